"""Server-sent events of a completion stream: lines to payloads, payloads to the few fields measured."""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"[DONE]"


class Delta(msgspec.Struct, gc=False):
    """The text of one chunk. Servers name the reasoning either way."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class Choice(msgspec.Struct, gc=False):
    """`delta` of a chat chunk, `text` of a completions chunk."""

    index: int = 0
    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct, gc=False):
    """What is read of an event; every other field is skipped without being built."""

    choices: list[Choice] | None = None
    usage: dict[str, Any] | None = None
    metadata: Any = None
    error: Any = None


decode_chunk = msgspec.json.Decoder(Chunk).decode


class EventSplitter:
    """Joins the bytes of a stream to the `data` payloads of its events.

    Lines end at a line feed, with or without a carriage return before it.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, body: bytes) -> list[bytes]:
        """The payloads of the events that are complete now."""
        if self._rest:
            body = self._rest + body
        lines = body.split(b"\n")
        self._rest = lines.pop()
        payloads = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif (not line or line == b"\r") and self._data:
                payloads.append(self._take())
        return payloads

    def finish(self) -> list[bytes]:
        """The payload of a last event that was not followed by its empty line, if any."""
        return self.feed(b"\n\n")

    def _take(self) -> bytes:
        data, self._data = self._data, []
        return data[0] if len(data) == 1 else b"\n".join(data)
