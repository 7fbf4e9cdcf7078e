"""The part of the OpenAPI document about memory."""

from __future__ import annotations

from kiln.http.openapi.parts import Json, ref
from kiln.http.routes.memory import DEFAULT_LIMIT, MAX_LIMIT, MAX_QUERY_CHARS
from kiln.store.facts import MAX_FACT_CHARS

_ID_PATTERN = "^[A-Za-z0-9_-]{1,64}$"


def paths() -> Json:
    owner, memory = [_OWNER], [_MEMORY, _STORE, _OWNER]
    deleted = {"200": _json("Deleted")}
    exported = {
        "description": "A Fact as JSON a line, oldest first.",
        "content": {"application/x-ndjson": {"schema": {"type": "string"}}},
    }
    summaries = {"200": _json("MemoryList")}
    return {
        "/lmkit/v1/memory": {
            "get": _operation("listMemories", "List the caller's memories", owner, summaries, 403)
        },
        "/lmkit/v1/memory/{memory_id}": {
            "get": _operation(
                "listFacts",
                "List or search facts",
                [*memory, *_listing()],
                {"200": _json("FactList")},
                *(400, 403, 404),
            ),
            "post": _write(memory),
            "delete": _operation(
                "clearMemory", "Delete all facts of a memory for good", memory, deleted, 400, 403, 404
            ),
        },
        "/lmkit/v1/memory/{memory_id}/export": {
            "get": _operation(
                "exportMemory", "Export all facts, invalid ones too", memory, {"200": exported}, 400, 403, 404
            )
        },
        "/lmkit/v1/memory/{memory_id}/{fact_id}": {
            "delete": _operation(
                "deleteFact",
                "Delete a fact for good",
                [*memory, _path("fact_id", {"type": "string"})],
                deleted,
                *(400, 403, 404),
            )
        },
    }


def _write(parameters: list[Json]) -> Json:
    operation = _operation(
        "writeFact",
        "Write a fact",
        parameters,
        {
            "201": _json("WrittenFact", "Written; it is on the disk."),
            "200": _json("WrittenFact", "It was known in these words."),
        },
        *(400, 403, 404, 408, 413, 415),
    )
    body = {"schema": ref("WriteFact"), "example": {"text": "The user's name is Ana."}}
    return {**operation, "requestBody": {"required": True, "content": {"application/json": body}}}


def schemas() -> Json:
    time: Json = {"type": "number", "description": "Unix time in seconds."}
    no_time: Json = {**time, "type": ["number", "null"]}
    no_text: Json = {"type": ["string", "null"]}
    fact = _object(
        id={"type": "string"},
        text={"type": "string", "maxLength": MAX_FACT_CHARS},
        created_at=time,
        last_used_at=no_time,
        uses={"type": "integer", "minimum": 0},
        invalidated_at=no_time,
        superseded_by={**no_text, "description": "The fact that stands in its place."},
        source={**no_text, "description": "The exchange it was learned from; null if it was written."},
    )
    summary = _object(
        memory={"type": "string"}, store={"type": "string"}, facts={"type": "integer", "minimum": 0}
    )
    return {
        "Fact": fact,
        "FactList": _object(
            facts={"type": "array", "items": ref("Fact")},
            next={**no_text, "description": "To be sent as `before` for older facts; null at the end."},
        ),
        "WrittenFact": _object(fact=ref("Fact"), status={"enum": ["added", "known", "replaced"]}),
        "WriteFact": {
            "type": "object",
            "properties": {"text": {"type": "string", "minLength": 1, "maxLength": MAX_FACT_CHARS}},
            "required": ["text"],
        },
        "MemoryList": _object(memories={"type": "array", "items": summary}),
        "Deleted": _object(deleted={"type": "integer", "minimum": 0}),
    }


def _listing() -> list[Json]:
    limit = {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT}
    return [
        _query(
            "q", {"type": "string", "maxLength": MAX_QUERY_CHARS}, "Facts that speak of this, best first."
        ),
        _query("limit", limit, "Facts at most."),
        _query("before", {"type": "string"}, "Facts older than the one with this id."),
        _query("invalid", {"type": "boolean", "default": False}, "Show facts that hold no longer, too."),
    ]


def _operation(
    operation_id: str, summary: str, parameters: list[Json], responses: Json, *errors: int
) -> Json:
    refusals = {
        str(status): {"$ref": f"#/components/responses/NativeError{status}"} for status in (*errors, 503)
    }
    return {
        "operationId": operation_id,
        "tags": ["memory"],
        "summary": summary,
        "parameters": parameters,
        "responses": {**responses, **refusals},
    }


def _json(schema: str, description: str = "Done.") -> Json:
    return {"description": description, "content": {"application/json": {"schema": ref(schema)}}}


def _object(**properties: Json) -> Json:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _query(name: str, schema: Json, description: str) -> Json:
    return {"name": name, "in": "query", "schema": schema, "description": description}


def _path(name: str, schema: Json) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": schema}


_MEMORY = _path("memory_id", {"type": "string", "pattern": _ID_PATTERN})
_STORE = _query("store", {"type": "string", "default": "default"}, "The store that the memory lies under.")
_OWNER = _query("owner", {"type": "string"}, "Whose memory, by the name of the key; for admins.")
