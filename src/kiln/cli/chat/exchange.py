"""One exchange of a chat, without terminal or network: the stream's events and what Ctrl-C means."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kiln.core.wording import counted

DONE = "[DONE]"


class ChatError(Exception):
    """The exchange failed; the message is for the user."""


class Phase(StrEnum):
    WAITING = "waiting"
    THINKING = "thinking"
    ANSWERING = "answering"


@dataclass(frozen=True, slots=True)
class Piece:
    """Text to show, of the thinking or of the answer."""

    phase: Phase
    text: str


@dataclass
class Exchange:
    """What has arrived so far. Times are seconds of one monotonic clock, handed in by the caller."""

    started_s: float
    phase: Phase = Phase.WAITING
    request_id: str | None = None
    answer: str = ""
    thinking_chunks: int = 0
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    budget: dict[str, Any] = field(default_factory=dict)
    first_s: float | None = None
    last_s: float | None = None
    thinking_ended_s: float | None = None
    skip_asked: bool = False
    skip_sent: bool = False
    cancelled: bool = False

    def accept(self, chunk: dict[str, Any], now: float) -> list[Piece]:
        """Take one event of the stream; gives what is to be shown. Raises ChatError on an error event."""
        if "error" in chunk:
            raise ChatError(error_text(chunk))
        self.request_id = chunk.get("id") or self.request_id
        self.usage = chunk.get("usage") or self.usage
        self.budget = (chunk.get("metadata") or {}).get("thinking_budget") or self.budget
        pieces: list[Piece] = []
        for choice in chunk.get("choices") or ():
            pieces += self._accept_delta(choice.get("delta") or {}, now)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        return pieces

    def _accept_delta(self, delta: dict[str, Any], now: float) -> list[Piece]:
        pieces = []
        if thought := delta.get("reasoning_content"):
            self._mark(now)
            self.phase = Phase.THINKING
            self.thinking_chunks += 1
            pieces.append(Piece(Phase.THINKING, thought))
        if content := delta.get("content"):
            self._mark(now)
            if self.phase is Phase.THINKING:
                self.thinking_ended_s = now
            self.phase = Phase.ANSWERING
            self.answer += content
            pieces.append(Piece(Phase.ANSWERING, content))
        return pieces

    def _mark(self, now: float) -> None:
        self.first_s = now if self.first_s is None else self.first_s
        self.last_s = now

    def interrupt(self) -> bool:
        """Take a Ctrl-C. True: end the exchange now. False: the thinking is to be cut short.

        Before the first token the wish is kept until there is thinking to cut.
        """
        if self.phase is Phase.ANSWERING or self.skip_asked:
            self.cancelled = True
        self.skip_asked = True
        return self.cancelled

    def skip_due(self) -> str | None:
        """The id of the request whose thinking is to be cut short now; given once."""
        due = self.skip_asked and not self.skip_sent and not self.cancelled
        if not due or self.phase is not Phase.THINKING:
            return None
        self.skip_sent = self.request_id is not None
        return self.request_id

    def thinking_tokens(self) -> int:
        """The server's own count where it gave one, else one for each piece that came."""
        exact = self.budget.get("thinking_tokens")
        return self.thinking_chunks if exact is None else int(exact)

    def thinking_s(self, now: float) -> float:
        """Seconds of thinking, as the server measured them or, meanwhile, as they look from here."""
        exact = self.budget.get("thinking_time_ms")
        if exact is not None:
            return float(exact) / 1000
        if self.first_s is None or self.thinking_chunks == 0:
            return 0.0
        ended = self.thinking_ended_s
        return (now if ended is None else ended) - self.first_s


# The chunks of a shorter exchange come bunched together: a speed by their times means nothing.
SHORTEST_RATED_S = 0.05


def summarize(exchange: Exchange) -> str:
    """One line on a finished exchange: thinking, what closed it, tokens, speed."""
    parts = []
    ended = exchange.last_s if exchange.last_s is not None else exchange.started_s
    if exchange.thinking_tokens() > 0 or exchange.budget.get("applied"):
        exact = "thinking_tokens" in exchange.budget
        tokens = counted(exchange.thinking_tokens(), "token")
        thought = f"thought {'' if exact else 'about '}{tokens} in {exchange.thinking_s(ended):.1f} s"
        parts.append(thought + _closed_by(exchange))
    elif exchange.budget.get("configured"):
        parts.append("no thinking, so the budget did not apply")
    if exchange.usage is not None and (total := exchange.usage.get("completion_tokens")) is not None:
        parts.append(counted(total, "completion token"))
        if exchange.first_s is not None and ended - exchange.first_s > SHORTEST_RATED_S and total > 1:
            # The first token marks the start, so it is not counted.
            parts.append(f"{(total - 1) / (ended - exchange.first_s):.1f} tokens/s")
    if exchange.finish_reason == "stop" and exchange.budget.get("closed") is False:
        parts.append("no answer: the model ended while it was thinking")
    if exchange.finish_reason not in (None, "stop"):
        parts.append(f"ended by {exchange.finish_reason}")
    if exchange.cancelled:
        parts.append("stopped by you")
    return " · ".join(parts)


def _closed_by(exchange: Exchange) -> str:
    trigger = exchange.budget.get("trigger")
    if trigger is not None:
        names = {"tokens": "the token budget", "time": "the time budget"}
        return f" (closed by {names.get(trigger, trigger)})"
    return " (cut short by you)" if exchange.skip_sent and not exchange.cancelled else ""


def error_text(body: Any) -> str:
    """The message and hint of an error body, whatever its shape."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if not isinstance(error, dict):
        return str(error)
    message = str(error.get("message") or error)
    return f"{message} ({error['hint']})" if error.get("hint") else message


async def read_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The JSON events of a server-sent event stream, up to `[DONE]`.

    Lines are split as bytes, at line feeds: text splitting would also cut at U+2028 and U+0085,
    which JSON allows inside a string. Raises ChatError for a stream that breaks off or is no JSON.
    """
    data: list[str] = []
    async for line in _lines(chunks):
        if line == b"":
            text = "\n".join(data)
            data = []
            if text == DONE:
                return
            if text:
                yield _decode(text)
        elif line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" ").decode("utf-8", "replace"))
    raise ChatError("the answer broke off: the server closed the connection")


def _decode(text: str) -> dict[str, Any]:
    try:
        event = json.loads(text)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise ChatError(f"the server sent an event that is no JSON object: {text[:80]}")
    return event


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")
