"""Short ways to talk to the native chat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from servers.server import PROMPT, Server

CHAT = "/lmkit/v1/chat"
SKIP = "/lmkit/v1/chat/skip-thinking"
ADD = {
    "name": "add",
    "description": "Add two numbers",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}

Event = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Native:
    """A running server, spoken to in the native dialect. Greedy unless asked otherwise."""

    server: Server

    def post(self, content: str = PROMPT, /, **fields: Any) -> httpx.Response:
        return self.server.client.post(CHAT, json=native_body(content, **fields))

    def ask(self, content: str = PROMPT, /, **fields: Any) -> dict[str, Any]:
        """The whole answer."""
        response = self.post(content, **fields)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def refuse(self, content: str = PROMPT, /, *, status: int = 400, **fields: Any) -> dict[str, str]:
        response = self.post(content, **fields)
        assert response.status_code == status, response.text
        error: dict[str, str] = response.json()
        return error

    def stream(self, content: str = PROMPT, /, **fields: Any) -> Stream:
        with self.streaming(content, **fields) as events:
            return Stream(list(events))

    @contextmanager
    def streaming(self, content: str = PROMPT, /, **fields: Any) -> Iterator[Iterator[Event]]:
        """Events as they arrive. The connection is closed at the end of the context."""
        body = native_body(content, stream=True, **fields)
        with self.server.client.stream("POST", CHAT, json=body) as response:
            assert response.status_code == 200, response.read()
            yield read_events(response)

    def skip(self, request_id: Any) -> httpx.Response:
        return self.server.client.post(SKIP, json={"request_id": request_id})


@dataclass(frozen=True)
class Stream:
    """A native stream, read to its end."""

    events: list[Event]

    @property
    def names(self) -> list[str]:
        """Event names in order, runs of the same one once; a delta's with its channel."""
        named = [f"delta {e['t']}" if n == "delta" else n for n, e in self.events]
        return [name for i, name in enumerate(named) if i == 0 or named[i - 1] != name]

    def all(self, name: str) -> list[dict[str, Any]]:
        return [payload for n, payload in self.events if n == name]

    def text(self, channel: str, index: int | None = None) -> str:
        return "".join(d["d"] for d in self.all("delta") if d["t"] == channel and d.get("i") == index)

    @property
    def done(self) -> dict[str, Any]:
        (done,) = self.all("done")
        return done


def native_body(content: str = PROMPT, /, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}


def read_events(response: httpx.Response) -> Iterator[Event]:
    name = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))
