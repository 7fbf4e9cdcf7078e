"""What one request's stream looked like from the client: when which text came, and how it ended.

Times are seconds of one monotonic clock (`time.perf_counter`), taken when a read of the socket
returned; all events of one read bear its time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kiln.loadgen.client.http1 import BadResponse, ResponseParser
from kiln.loadgen.client.sse import DONE, Choice, EventSplitter, decode_chunk

ANSWER, REASONING, TOOL_CALL = range(3)
MAX_ERROR_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed. `kind` is what reports count by: connect, timeout, cut, malformed,
    error_event, or http_ and the status."""

    kind: str
    message: str


@dataclass(slots=True)
class Trace:
    """One request. The three lists have one entry for each chunk that carried text."""

    started_s: float
    ended_s: float | None = None
    times_s: list[float] = field(default_factory=list)
    channels: bytearray = field(default_factory=bytearray)
    choices: list[int] = field(default_factory=list)
    status: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    budget: dict[str, Any] | None = None
    done: bool = False
    failure: Failure | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None and self.ended_s is not None

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first text of any channel."""
        return self.times_s[0] - self.started_s if self.times_s else None

    @property
    def answer_s(self) -> float | None:
        """Seconds to the first text of the answer; None if there was only reasoning."""
        first = self.channels.find(ANSWER)
        return self.times_s[first] - self.started_s if first >= 0 else None

    @property
    def e2e_s(self) -> float | None:
        return None if self.ended_s is None else self.ended_s - self.started_s

    @property
    def tokens(self) -> int:
        """Output tokens: the server's count, else the number of chunks with text."""
        return len(self.times_s) if self.completion_tokens is None else self.completion_tokens

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds an output token after the first; None for fewer than two tokens or chunks."""
        if len(self.times_s) < 2 or self.tokens < 2:
            return None
        return (self.times_s[-1] - self.times_s[0]) / (self.tokens - 1)

    def gaps_s(self) -> list[float]:
        """Seconds between successive chunks with text of the same choice."""
        if not any(self.choices):
            times = self.times_s
            return [b - a for a, b in zip(times, times[1:], strict=False)]
        last: dict[int, float] = {}
        gaps = []
        for choice, time_s in zip(self.choices, self.times_s, strict=True):
            if choice in last:
                gaps.append(time_s - last[choice])
            last[choice] = time_s
        return gaps


class StreamReceiver:
    """Fills a trace from the bytes of its response. Knows no socket and no clock."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.started = False
        self._parser = ResponseParser()
        self._events = EventSplitter()
        self._error_body = b""
        self._streaming = False

    @property
    def reusable(self) -> bool:
        return self._parser.reusable

    @property
    def settled(self) -> bool:
        return self.trace.done or self.trace.failure is not None

    def feed(self, data: bytes, now_s: float) -> bool:
        """Take bytes that were read at `now_s`; True when the response is over."""
        parser = self._parser
        try:
            body = parser.feed(data)
            if not self.started and parser.status >= 200:
                self._begin()
            if self._streaming:
                for payload in self._events.feed(body):
                    self._accept(payload, now_s)
            elif len(self._error_body) < MAX_ERROR_BYTES:
                self._error_body += body
        except (BadResponse, msgspec.DecodeError, UnicodeDecodeError) as error:
            self._fail("malformed", f"the stream cannot be read: {error}", now_s)
            return True
        if parser.complete:
            self._complete(now_s)
        return parser.complete

    def closed(self, now_s: float, reason: str | None) -> None:
        """The connection is gone, by the peer's wish or by an error, before the response was over."""
        self._parser.end_of_input()
        if self._parser.complete:
            self._complete(now_s)
        elif not self.trace.done:
            when = "before the answer began" if not self.started else "in the middle of the answer"
            self._fail("cut", f"the connection ended {when}" + (f": {reason}" if reason else ""), now_s)

    def time_out(self, now_s: float, timeout_s: float) -> None:
        self._fail("timeout", f"no complete answer within {timeout_s:g} s", now_s)

    def _begin(self) -> None:
        self.started = True
        self.trace.status = self._parser.status
        kind = self._parser.headers.get("content-type", "")
        self._streaming = self._parser.status == 200 and kind.startswith("text/event-stream")

    def _accept(self, payload: bytes, now_s: float) -> None:
        trace = self.trace
        if payload == DONE:
            trace.done = True
            trace.ended_s = now_s
            return
        chunk = decode_chunk(payload)
        if chunk.error is not None:
            self._fail("error_event", error_text({"error": chunk.error}), now_s)
            return
        for choice in chunk.choices or ():
            channel = _channel(choice)
            if channel is not None:
                trace.times_s.append(now_s)
                trace.channels.append(channel)
                trace.choices.append(choice.index)
            if choice.finish_reason is not None:
                trace.finish_reason = choice.finish_reason
        if chunk.usage is not None:
            self._take_usage(chunk.usage)
        if chunk.metadata is not None:
            self._take_metadata(chunk.metadata)

    def _take_usage(self, usage: dict[str, Any]) -> None:
        details = usage.get("prompt_tokens_details")
        self.trace.prompt_tokens = _count(usage.get("prompt_tokens"))
        self.trace.completion_tokens = _count(usage.get("completion_tokens"))
        self.trace.cached_tokens = _count(details.get("cached_tokens")) if isinstance(details, dict) else None

    def _take_metadata(self, metadata: Any) -> None:
        budget = metadata.get("thinking_budget") if isinstance(metadata, dict) else None
        if isinstance(budget, dict):
            self.trace.budget = budget

    def _complete(self, now_s: float) -> None:
        trace = self.trace
        if trace.failure is not None or trace.done:
            return
        if self._streaming:
            for payload in self._events.finish():
                self._accept(payload, now_s)
            if trace.finish_reason is None and not trace.done:
                self._fail("cut", "the stream ended without a finish reason and without [DONE]", now_s)
        elif trace.status == 200:
            kind = self._parser.headers.get("content-type") or "of no type"
            self._fail("malformed", f"the answer is {kind} and not an event stream", now_s)
        else:
            self._fail(f"http_{trace.status}", body_text(self._error_body), now_s)
        if trace.ended_s is None:
            trace.ended_s = now_s

    def _fail(self, kind: str, message: str, now_s: float) -> None:
        if self.trace.failure is None:
            self.trace.failure = Failure(kind, message)
            self.trace.ended_s = now_s


def _channel(choice: Choice) -> int | None:
    """Which channel the text of a chunk belongs to; None for a chunk without text."""
    delta = choice.delta
    if delta is None:
        return ANSWER if choice.text else None
    if delta.content:
        return ANSWER
    if delta.reasoning_content or delta.reasoning:
        return REASONING
    return TOOL_CALL if delta.tool_calls else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def error_text(body: Any) -> str:
    """The message of an error body, whatever its shape; at most 300 characters."""
    error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:300]


def body_text(body: bytes) -> str:
    """The message of an error response, JSON or not."""
    text = body.decode("utf-8", "replace")
    try:
        return error_text(json.loads(text))
    except ValueError:
        return " ".join(text.split())[:300] or "no message"
