"""What the OpenAPI document says of `/v1/openai`. Schemas come from the wire structs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from kiln.wire import openai_chat, openai_text

Json = dict[str, Any]

# Names of structs that others have too are told apart by this.
_PREFIX = "Openai"
_STRUCTS = (
    openai_chat.ChatRequest,
    openai_chat.ChatResponse,
    openai_chat.ChatChunk,
    openai_text.TextRequest,
    openai_text.TextResponse,
    openai_text.TokenizeRequest,
    openai_text.TokenizeResponse,
    openai_text.DetokenizeRequest,
    openai_text.DetokenizeResponse,
    openai_text.EmbeddingRequest,
    openai_text.EmbeddingResponse,
)
_GENERATES = (400, 404, 408, 413, 415, 429, 500, 503, 504)


def openai_schemas() -> Json:
    """The structs' schemas by their names in the document."""
    template = f"#/components/schemas/{_PREFIX}{{name}}"
    _, found = msgspec.json.schema_components(_STRUCTS, ref_template=template)
    return {f"{_PREFIX}{name}": schema for name, schema in found.items()}


def openai_paths() -> Json:
    return {
        "/v1/openai/chat/completions": {
            "post": _posts(
                "createOpenaiChatCompletion",
                "Continue a conversation, for OpenAI's clients",
                "Answers whole, or with `stream: true` as server-sent events, which are ChatChunk objects.",
                openai_chat.ChatRequest,
                openai_chat.ChatResponse,
                openai_chat.ChatChunk,
            )
        },
        "/v1/openai/completions": {
            "post": _posts(
                "createOpenaiCompletion",
                "Continue a text",
                "The prompt is read as it is, without the chat template. With `echo` and `logprobs` its own"
                " tokens are scored.",
                openai_text.TextRequest,
                openai_text.TextResponse,
                openai_text.TextResponse,
            )
        },
        "/v1/openai/tokenize": {
            "post": _posts(
                "tokenize",
                "Token ids of a text or a conversation",
                "A conversation is rendered with the chat template, as a completion of it would be.",
                openai_text.TokenizeRequest,
                openai_text.TokenizeResponse,
            )
        },
        "/v1/openai/detokenize": {
            "post": _posts(
                "detokenize",
                "The text of token ids",
                "Control tokens are spelled out.",
                openai_text.DetokenizeRequest,
                openai_text.DetokenizeResponse,
            )
        },
        "/v1/openai/embeddings": {
            "post": _posts(
                "createOpenaiEmbeddings",
                "Vectors of texts",
                "Of unit length, by the configured embedding model; 404 without one.",
                openai_text.EmbeddingRequest,
                openai_text.EmbeddingResponse,
            )
        },
        "/v1/openai/models": {"get": _gets("listOpenaiModels", "List the served models", "ModelList")},
        "/v1/openai/models/{model}": {
            "get": {
                **_gets("getOpenaiModel", "Show a served model", "Model", (404, 500)),
                "parameters": [
                    {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
                ],
            }
        },
    }


def _posts(
    operation_id: str,
    summary: str,
    description: str,
    request: type,
    response: type,
    chunk: type | None = None,
) -> Json:
    content = {"application/json": {"schema": _ref(response)}}
    if chunk is not None:
        events = {"type": "string", "description": f"Events of {_name(chunk)}."}
        content["text/event-stream"] = {"schema": events}
    return {
        "operationId": operation_id,
        "tags": ["openai"],
        "summary": summary,
        "description": description,
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(request)}}},
        "responses": {"200": {"description": "The answer.", "content": content}, **_problems(_GENERATES)},
    }


def _gets(operation_id: str, summary: str, body: str, statuses: Iterable[int] = (500,)) -> Json:
    schema = {"$ref": f"#/components/schemas/{body}"}
    return {
        "operationId": operation_id,
        "tags": ["openai"],
        "summary": summary,
        "responses": {
            "200": {"description": "What is served.", "content": {"application/json": {"schema": schema}}},
            **_problems(statuses),
        },
    }


def _name(struct: type) -> str:
    return f"{_PREFIX}{struct.__name__}"


def _ref(struct: type) -> Json:
    return {"$ref": f"#/components/schemas/{_name(struct)}"}


def _problems(statuses: Iterable[int]) -> Json:
    return {str(status): {"$ref": f"#/components/responses/Error{status}"} for status in statuses}
