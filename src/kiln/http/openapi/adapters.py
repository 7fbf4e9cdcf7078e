"""The part of the OpenAPI document about adapters."""

from __future__ import annotations

import msgspec

from kiln.http.openapi.parts import Json, ref
from kiln.wire import adapters as wire

_STRUCTS = (
    wire.AdapterName,
    wire.AdapterMerge,
    wire.AdapterList,
    wire.AdapterDefault,
    wire.AdapterSaved,
    wire.AdapterMerged,
    wire.AdapterDeleted,
)
_NAME: Json = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}


def paths() -> Json:
    return {
        "/v1/adapters": {
            "get": _operation(
                "listAdapters",
                "List the saved LoRA adapters",
                "Reads what has changed on the disk. An adapter that cannot be loaded has a `problem`.",
                {"200": _json("The adapters, by name.", "AdapterList")},
                (500,),
            )
        },
        "/v1/adapters/load": {
            "post": _operation(
                "loadAdapter",
                "Make an adapter the server's default",
                "Requests that name no adapter get it from now on.",
                {"200": _json("The new default.", "AdapterDefault")},
                (400, 404, 408, 413, 415, 500),
                body=("AdapterName", {"name": "math"}),
            )
        },
        "/v1/adapters/unload": {
            "post": _operation(
                "unloadAdapter",
                "Make the base model the server's default",
                "The body is not read. Running requests keep their adapter.",
                {"200": _json("The new default.", "AdapterDefault")},
                (500,),
            )
        },
        "/v1/adapters/upload": {"post": _upload()},
        "/v1/adapters/merge": {
            "post": _operation(
                "mergeAdapters",
                "Save a merge of adapters as a new one",
                "Computed on the deltas. `concat` is their exact weighted sum; `weighted_average` and `ties`"
                " are brought to a rank, and `relative_error` says what that cost.",
                {"201": _json("The new adapter.", "AdapterMerged")},
                (400, 404, 408, 409, 413, 415, 500),
                body=(
                    "AdapterMerge",
                    {
                        "name": "both",
                        "method": "ties",
                        "adapters": [{"name": "math", "weight": 1}, {"name": "style", "weight": 0.5}],
                        "density": 0.3,
                    },
                ),
            )
        },
        "/v1/adapters/{name}/download": {"get": _download()},
        "/v1/adapters/{name}": {
            "delete": {
                **_operation(
                    "deleteAdapter",
                    "Delete an adapter",
                    "Running requests keep it. The server's default must be unloaded first.",
                    {"200": _json("It is gone.", "AdapterDeleted")},
                    (400, 404, 409, 500),
                ),
                "parameters": [_NAME],
            }
        },
    }


def schemas() -> Json:
    _, found = msgspec.json.schema_components(_STRUCTS, ref_template="#/components/schemas/{name}")
    return found


def _upload() -> Json:
    fields = {
        "name": {"type": "string", "description": "What the adapter is to be called."},
        "archive": {
            "type": "string",
            "contentMediaType": "application/gzip",
            "description": "A `.tar.gz` of `adapter_config.json` and `adapter_model.safetensors`, which may"
            " be in one folder.",
        },
    }
    operation = _operation(
        "uploadAdapter",
        "Save an adapter",
        "One of the same name is replaced in one step; running requests keep the old one.",
        {"201": _json("The adapter.", "AdapterSaved")},
        (400, 408, 409, 413, 415, 500),
    )
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    return operation


def _download() -> Json:
    archive: Json = {"schema": {"type": "string", "contentMediaType": "application/gzip"}}
    return {
        **_operation(
            "downloadAdapter",
            "Download an adapter",
            "The same content gives the same bytes.",
            {"200": {"description": "A `.tar.gz`.", "content": {"application/gzip": archive}}},
            (400, 404, 409, 413, 500),
        ),
        "parameters": [_NAME],
    }


def _operation(
    operation_id: str,
    summary: str,
    description: str,
    responses: Json,
    statuses: tuple[int, ...],
    body: tuple[str, Json] | None = None,
) -> Json:
    operation: Json = {
        "operationId": operation_id,
        "tags": ["adapters"],
        "summary": summary,
        "description": description,
        "responses": {
            **responses,
            **{str(status): {"$ref": f"#/components/responses/Error{status}"} for status in statuses},
        },
    }
    if body is not None:
        content = {"application/json": {"schema": ref(body[0]), "example": body[1]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _json(description: str, name: str) -> Json:
    return {"description": description, "content": {"application/json": {"schema": ref(name)}}}
