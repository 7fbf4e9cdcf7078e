"""Clients that check every answer of a server against the project's contract while they receive it.

The transports pass bytes on unchanged. What breaks the contract is noted in `violations`, and a fixture
fails the test that was running: a client library may swallow an exception, but not a note.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import msgspec

from contract.validators import validate, validate_chat_stream
from kiln.wire import lmkit as wire
from openai_profile import checks

CHAT = "/v1/chat/completions"
NATIVE_CHAT = "/lmkit/v1/chat"
ERROR_KEYS = {"message", "type", "param", "code", "hint"}
ERROR_TYPES = {"invalid_request_error", "rate_limit_error", "server_error"}
TIMEOUT_S = 120.0

violations: list[str] = []


class CheckedTransport(httpx.HTTPTransport):
    """httpx's own transport, with a tee."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        assert isinstance(response.stream, httpx.SyncByteStream)
        stream = _Tee(response.stream, _Answer(request, response))
        return httpx.Response(
            response.status_code, headers=response.headers, stream=stream, extensions=response.extensions
        )


class CheckedAsyncTransport(httpx.AsyncHTTPTransport):
    """The same for asyncio."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        stream = _AsyncTee(response.stream, _Answer(request, response))
        return httpx.Response(
            response.status_code, headers=response.headers, stream=stream, extensions=response.extensions
        )


def client(url: str) -> httpx.Client:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.Client(base_url=url, transport=CheckedTransport(limits=limits), timeout=TIMEOUT_S)


def async_client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=url, transport=CheckedAsyncTransport(limits=limits), timeout=TIMEOUT_S)


class _Answer:
    """What one request was answered, and the check of it once it is whole."""

    def __init__(self, request: httpx.Request, response: httpx.Response) -> None:
        self.request = request
        self.response = response
        self.body = bytearray()

    def check(self) -> None:
        where = f"{self.request.method} {self.request.url.path} -> {self.response.status_code}: "
        violations.extend(where + problem for problem in self._problems())

    def _problems(self) -> list[str]:
        path, status = self.request.url.path, self.response.status_code
        kind = self.response.headers.get("content-type", "")
        if path == "/metrics" and status == 200:
            return []
        if path.startswith("/v1/openai/") and self.request.method == "POST" and status == 200:
            streamed = kind.startswith("text/event-stream")
            body = bytes(self.body) if streamed else json.loads(self.body)
            return checks.problems(path, json.loads(self.request.content), body, streamed=streamed)
        if kind.startswith("text/event-stream"):
            if path not in (CHAT, NATIVE_CHAT) or status != 200:
                return ["an event stream where none belongs"]
            check = native_stream_problems if path == NATIVE_CHAT else stream_problems
            return check(bytes(self.body))
        if kind != "application/json":
            return [f"content type {kind!r}"]
        body = json.loads(self.body)
        if path == "/health":
            return []
        if status >= 400:
            return native_error_problems(body) if path.startswith("/lmkit/") else error_problems(body)
        if path == NATIVE_CHAT:
            return native_payload_problems("answer", body)
        return response_problems(body) if path == CHAT else []


class _Tee(httpx.SyncByteStream):
    def __init__(self, inner: httpx.SyncByteStream, answer: _Answer) -> None:
        self._inner = inner
        self._answer = answer

    def __iter__(self) -> Iterator[bytes]:
        for part in self._inner:
            self._answer.body += part
            yield part
        self._answer.check()

    def close(self) -> None:
        self._inner.close()


class _AsyncTee(httpx.AsyncByteStream):
    def __init__(self, inner: httpx.AsyncByteStream, answer: _Answer) -> None:
        self._inner = inner
        self._answer = answer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._inner:
            self._answer.body += part
            yield part
        self._answer.check()

    async def aclose(self) -> None:
        await self._inner.aclose()


def error_problems(body: Any) -> list[str]:
    """Of the error body of `/v1` and everything that is no route."""
    if not isinstance(body, dict) or set(body) != {"error"} or not isinstance(body["error"], dict):
        return [f"no error body: {body!r}"]
    error = body["error"]
    if set(error) != ERROR_KEYS:
        return [f"error with the fields {sorted(error)}"]
    problems = []
    for key in ("message", "code"):
        if not isinstance(error[key], str) or not error[key]:
            problems.append(f"error.{key} is {error[key]!r}")
    if error["type"] not in ERROR_TYPES:
        problems.append(f"error.type is {error['type']!r}")
    for key in ("param", "hint"):
        if error[key] is not None and not (isinstance(error[key], str) and error[key]):
            problems.append(f"error.{key} is {error[key]!r}")
    return problems


def native_error_problems(body: Any) -> list[str]:
    """Of the error body of `/lmkit/v1`."""
    if not isinstance(body, dict) or set(body) != {"error", "code"}:
        return [f"no native error body: {body!r}"]
    return [f"{k} is {v!r}" for k, v in body.items() if not isinstance(v, str) or not v]


NATIVE_PAYLOADS = {
    "status": wire.StatusEvent,
    "delta": wire.DeltaEvent,
    "skill": wire.SkillEvent,
    "tool_call": wire.ToolCallEvent,
    "tool_use": wire.ToolUseEvent,
    "done": wire.DoneEvent,
    "error": wire.NativeError,
    "answer": wire.NativeChatResponse,
}


def native_payload_problems(name: str, body: Any) -> list[str]:
    """Of one event's payload, or of the whole answer: exactly the struct's fields, and no null."""
    if name not in NATIVE_PAYLOADS:
        return [f"an event named {name!r}"]
    try:
        value = msgspec.convert(body, NATIVE_PAYLOADS[name])
    except msgspec.ValidationError as error:
        return [f"{name}: {error}"]
    # What the struct does not know, or writes otherwise, shows in the way back.
    return [] if msgspec.to_builtins(value) == body else [f"{name} is not as described: {body!r}"]


def native_stream_problems(raw: bytes) -> list[str]:
    """Of a whole native stream: named events, `done` or `error` once and at the end."""
    if not raw.endswith(b"\n\n"):
        return ["the stream is cut"]
    names, problems = [], []
    for event in raw.decode().removesuffix("\n\n").split("\n\n"):
        if event == ":":
            continue
        head, _, data = event.partition("\ndata: ")
        names.append(head.removeprefix("event: "))
        problems += native_payload_problems(names[-1], json.loads(data))
    if names[-1] not in ("done", "error") or {"done", "error"} & set(names[:-1]):
        problems.append(f"done or error comes once and last, not {names}")
    return problems


def response_problems(body: Any) -> list[str]:
    """Of a chat completion: the schema, and what a schema cannot say."""
    problems = validate("ChatCompletionResponse", body)
    if problems:
        return problems
    problems += usage_problems(body["usage"])
    choices, metadata = body["choices"], body["metadata"]
    if [choice["index"] for choice in choices] != list(range(len(choices))):
        problems.append("choices are not in index order")
    first, record = choices[0], metadata["thinking_budget"]
    if metadata["final_content_empty"] != (first["message"]["content"] == ""):
        if not metadata["reasoning_folded_into_content"]:
            problems.append("final_content_empty does not tell the truth")
    if ("content_empty_reason" in metadata) != metadata["final_content_empty"]:
        problems.append("content_empty_reason goes with an empty content")
    for choice in choices:
        if ("thinking_budget" in choice) != record["applied"]:
            problems.append("a choice has an outcome exactly when the budget applied")
        if (choice["finish_reason"] == "tool_calls") != ("tool_calls" in choice["message"]):
            problems.append("finish_reason tool_calls goes with tool calls")
    if record["applied"] and not first["thinking_budget"].items() <= record.items():
        problems.append("the record differs from the outcome of choice 0")
    return problems


def usage_problems(usage: dict[str, int]) -> list[str]:
    if usage["total_tokens"] != usage["prompt_tokens"] + usage["completion_tokens"]:
        return [f"usage does not add up: {usage}"]
    return []


def stream_problems(raw: bytes) -> list[str]:
    """Of a whole chat stream, be it one that ends with an error event."""
    head, _, last = raw.removesuffix(b"\n\n").rpartition(b"\n\n")
    if not last.startswith(b'data: {"error"'):
        return validate_chat_stream(raw)
    problems = error_problems(json.loads(last.removeprefix(b"data: ")))
    if not raw.endswith(b"\n\n"):
        problems.append("the error event is cut")
    for event in filter(None, head.split(b"\n\n")):
        if not event.startswith(b"data: {"):
            problems.append(f"no chunk before an error event: {event[:80]!r}")
            continue
        chunk = json.loads(event.removeprefix(b"data: "))
        problems += validate("ChatCompletionChunk", chunk)
        if any("finish_reason" in choice for choice in chunk["choices"]):
            problems.append("a stream finished and failed")
    return problems
