"""The part of the OpenAPI document about access: security schemes, refusals, the session routes."""

from __future__ import annotations

from kiln.http.guard import COOKIE, required_scope
from kiln.http.openapi.parts import Json, ref
from kiln.store.keys import MAX_CONCURRENCY, MAX_RATE

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
    return _session() | _keys()


def _keys() -> Json:
    example = {"name": "ana", "scope": "inference", "rate_per_minute": 60}
    body = {"schema": ref("CreateKey"), "example": example}
    name: Json = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "/lmkit/v1/keys": {
            "get": {
                "operationId": "listKeys",
                "tags": ["access"],
                "summary": "List all keys, revoked ones too",
                "responses": {"200": _json("KeyList", "The keys, without their secrets."), **_errors(503)},
            },
            "post": {
                "operationId": "createKey",
                "tags": ["access"],
                "summary": "Create a key",
                "requestBody": {"required": True, "content": {"application/json": body}},
                "responses": {
                    "201": _json("CreatedKey", "In force at once; its secret is shown this once."),
                    **_errors(400, 408, 413, 415, 503),
                },
            },
        },
        "/lmkit/v1/keys/{name}": {
            "delete": {
                "operationId": "revokeKey",
                "tags": ["access"],
                "summary": "Revoke a key and its sessions",
                "parameters": [name],
                "responses": {"200": _json("Key", "The key, as it was."), **_errors(404, 503)},
            }
        },
    }


def _session() -> Json:
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
                    **_errors(400, 401, 403, 408, 413, 415),
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
    return _key_schemas() | {
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
    return _json("Caller", description)


def _json(schema: str, description: str) -> Json:
    return {"description": description, "content": {"application/json": {"schema": ref(schema)}}}


def _key_schemas() -> Json:
    scope: Json = {"enum": ["inference", "admin"]}
    time: Json = {"type": ["number", "null"], "description": "Unix time in seconds."}
    at_once: Json = {"type": ["integer", "null"], "minimum": 1, "maximum": MAX_CONCURRENCY}
    a_minute: Json = {"type": ["integer", "null"], "minimum": 1, "maximum": MAX_RATE}
    asked: Json = {
        "name": {"type": "string"},
        "scope": {**scope, "default": "inference"},
        "max_concurrency": at_once,
        "rate_per_minute": a_minute,
    }
    shown: Json = {
        "name": {"type": "string"},
        "prefix": {"type": "string", "description": "The first letters of the secret."},
        "scope": scope,
        "max_concurrency": at_once,
        "rate_per_minute": a_minute,
        "created_at": {**time, "type": "number"},
        "last_used_at": time,
        "revoked_at": time,
    }
    return {
        "CreateKey": {"type": "object", "properties": asked, "required": ["name"]},
        "Key": _closed(shown),
        "KeyList": _closed({"keys": {"type": "array", "items": ref("Key")}}),
        "CreatedKey": _closed({"key": ref("Key"), "secret": {"type": "string"}}),
    }


def _closed(properties: Json) -> Json:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _errors(*statuses: int) -> Json:
    return {str(status): {"$ref": f"#/components/responses/NativeError{status}"} for status in statuses}
