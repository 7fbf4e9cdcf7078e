"""The native chat in the OpenAPI document. Its schemas are those of the wire structs."""

from __future__ import annotations

from collections.abc import Iterable

from kiln.http.openapi.parts import Json, ref

_EVENTS = (
    (
        "status",
        "StatusEvent",
        "A step of the preparation: fetching or loading the model, a place, the prompt.",
    ),
    ("delta", "DeltaEvent", "Generated text of one channel, and of one alternative when n is above 1."),
    ("skill", "SkillEvent", "A skill was pinned, activated or read from, or is missing."),
    ("tool_call", "ToolCallEvent", "The model calls a tool of the client."),
    ("tool_use", "ToolUseEvent", "A tool that the server runs: running, then done, error or denied."),
    ("done", "DoneEvent", "The summary, and the end."),
    ("error", "NativeError", "The exchange failed, and the end."),
)


def native_paths() -> Json:
    """The paths of `/lmkit/v1` that this module describes."""
    return {
        "/lmkit/v1/chat": {"post": _chat()},
        "/lmkit/v1/chat/skip-thinking": {"post": _skip()},
    }


def _chat() -> Json:
    events = "\n".join(f"- `{name}` ({schema}): {words}" for name, schema, words in _EVENTS)
    return {
        "operationId": "createNativeChat",
        "tags": ["native"],
        "summary": "Answer a conversation, with tools, skills and memory of the server",
        "description": "Answers whole, or with `stream: true` as named server-sent events. A request that"
        " fails before its first event is answered with an HTTP error, a later failure with an error event.",
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": ref("NativeChatRequest"),
                    "example": {
                        "messages": [{"role": "user", "content": "3+8-2+7=?"}],
                        "reasoning": "low",
                        "stream": True,
                    },
                }
            },
        },
        "responses": {
            "200": {
                "description": f"The answer; with `stream: true`, its events:\n\n{events}",
                "content": {
                    "application/json": {"schema": ref("NativeChatResponse")},
                    "text/event-stream": {"schema": {"type": "string"}},
                },
            },
            **_problems((400, 404, 408, 409, 413, 415, 429, 500, 503, 504)),
        },
    }


def _skip() -> Json:
    return {
        "operationId": "skipThinking",
        "tags": ["exchange"],
        "summary": "End the thinking of a running exchange",
        "description": "The model closes its reasoning and answers. Without effect once the answer began."
        " Takes the `request_id` of a native chat, or the `chatcmpl-` id of any chat. Errors have the native"
        " body.",
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": ref("SkipThinking"),
                    "example": {"request_id": "chatcmpl-9a0c"},
                }
            },
        },
        "responses": {
            "202": {
                "description": "The exchange is running.",
                "content": {"application/json": {"schema": ref("Accepted")}},
            },
            **_problems((400, 404, 408, 409, 413, 415, 500)),
        },
    }


def _problems(statuses: Iterable[int]) -> Json:
    return {str(status): {"$ref": f"#/components/responses/NativeError{status}"} for status in statuses}
