"""The part of the OpenAPI document about access: security schemes, refusals, the session routes."""

from __future__ import annotations

from kiln.http.guard import COOKIE, required_scope
from kiln.http.openapi_parts import Json, ref

SCHEMES: Json = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key."},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "An API key."},
    "session": {"type": "apiKey", "in": "cookie", "name": COOKIE, "description": "A browser's session."},
}
# The empty one stands for servers that serve everybody.
SECURITY: list[Json] = [{}, {"bearer": []}, {"header": []}, {"session": []}]

_METHODS = ("get", "put", "post", "delete", "patch")


def with_refusals(paths: Json) -> Json:
    """The same paths, with what the guard may answer instead of their routes."""
    for path, methods in paths.items():
        errors = "NativeError" if path.startswith("/lmkit/") else "Error"
        for method, operation in methods.items():
            if method not in _METHODS:
                continue
            scope = required_scope(method.upper(), path)
            if scope == "open":
                operation["security"] = [{}]
                continue
            if scope == "admin":
                operation["description"] = f"{operation.get('description', '')} Needs scope admin.".strip()
            for status in (401, 403, *((429,) if method == "post" else ())):
                reference = {"$ref": f"#/components/responses/{errors}{status}"}
                operation["responses"].setdefault(str(status), reference)
    return paths


def paths() -> Json:
    return {
        "/lmkit/v1/session": {
            "post": {
                "operationId": "beginSession",
                "tags": ["access"],
                "summary": "Trade an API key for a browser's cookie",
                "requestBody": {
                    "required": True,
                    "content": {
                        "application/json": {"schema": ref("BeginSession"), "example": {"key": "kiln-…"}}
                    },
                },
                "responses": {
                    "201": _caller("Begun; the cookie is set."),
                    **_errors(400, 401, 403, 413, 415),
                },
            },
            "get": {
                "operationId": "getSession",
                "tags": ["access"],
                "summary": "Who the caller is",
                "responses": {"200": _caller("The caller."), **_errors(401)},
            },
            "delete": {
                "operationId": "endSession",
                "tags": ["access"],
                "summary": "End the browser's session",
                "responses": {"204": {"description": "There is no session any more."}, **_errors(403)},
            },
        }
    }


def schemas() -> Json:
    return {
        "BeginSession": {
            "type": "object",
            "properties": {"key": {"type": "string"}},
            "required": ["key"],
        },
        "Caller": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "description": "The name of the key, or anonymous."},
                "scopes": {"type": "array", "items": {"enum": ["inference", "admin"]}},
                "session_expires_at": {
                    "type": ["integer", "null"],
                    "description": "Unix time; null where there is no session.",
                },
            },
            "required": ["name", "scopes", "session_expires_at"],
            "additionalProperties": False,
        },
    }


def _caller(description: str) -> Json:
    return {"description": description, "content": {"application/json": {"schema": ref("Caller")}}}


def _errors(*statuses: int) -> Json:
    return {str(status): {"$ref": f"#/components/responses/NativeError{status}"} for status in statuses}
