"""Servers for the tests, on real sockets, and short ways to talk to them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette

from kiln.cli.assembly import create_app
from kiln.cli.embedded import serve_app
from kiln.core.settings import Settings
from kiln.http.connection import protocol_within

from . import traffic

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
PROMPT = "3+8-2+7=?"
WAIT_S = 60.0


@dataclass
class Streamed:
    """A chat stream, read to its end."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    error: dict[str, Any] | None = None
    done: bool = False

    @classmethod
    def parse(cls, raw: bytes) -> Streamed:
        streamed = cls()
        for event in filter(None, raw.decode().split("\n\n")):
            data = event.removeprefix("data: ")
            if data == "[DONE]":
                streamed.done = True
                continue
            body = json.loads(data)
            if "error" in body:
                streamed.error = body["error"]
            else:
                streamed.chunks.append(body)
        return streamed

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk["choices"]]

    def texts(self, key: str) -> list[str]:
        """Every delta of one kind: `content` or `reasoning_content`."""
        return [c["delta"][key] for c in self.choices if key in c["delta"]]

    @property
    def content(self) -> str:
        return "".join(self.texts("content"))

    @property
    def reasoning(self) -> str:
        return "".join(self.texts("reasoning_content"))

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        return [call for c in self.choices for call in c["delta"].get("tool_calls", [])]

    @property
    def finish_reason(self) -> str:
        (reason,) = [c["finish_reason"] for c in self.choices if "finish_reason" in c]
        assert isinstance(reason, str)
        return reason

    @property
    def record(self) -> dict[str, Any]:
        (metadata,) = [chunk["metadata"] for chunk in self.chunks if "metadata" in chunk]
        record: dict[str, Any] = metadata["thinking_budget"]
        return record

    @property
    def usage(self) -> dict[str, int]:
        (usage,) = [chunk["usage"] for chunk in self.chunks if "usage" in chunk]
        counts: dict[str, int] = usage
        return counts


@dataclass(frozen=True)
class Server:
    """A running server, a checked client of it, and its application."""

    url: str
    client: httpx.Client
    app: Starlette

    def post(self, content: str = PROMPT, /, **fields: Any) -> httpx.Response:
        return self.client.post(traffic.CHAT, json=chat_body(content, **fields))

    def ask(self, content: str = PROMPT, /, **fields: Any) -> dict[str, Any]:
        """A whole completion, greedy unless asked otherwise."""
        response = self.post(content, **fields)
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    def refuse(self, content: str = PROMPT, /, **fields: Any) -> dict[str, Any]:
        """The error of a request that must be refused with 400."""
        response = self.post(content, **fields)
        assert response.status_code == 400, response.text
        error: dict[str, Any] = response.json()["error"]
        return error

    def stream(self, content: str = PROMPT, /, **fields: Any) -> Streamed:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        response = self.post(content, **{**options, **fields})
        assert response.status_code == 200, response.text
        return Streamed.parse(response.content)

    def metric(self, name: str, **labels: str) -> float:
        return metric(self.client.get("/metrics").text, name, **labels)

    def outcomes(self) -> dict[str, float]:
        """kiln_thinking_budget_outcomes_total by outcome."""
        text = self.client.get("/metrics").text
        found = re.findall(r'^kiln_thinking_budget_outcomes_total\{outcome="(\w+)"\} (\S+)$', text, re.M)
        return {name: float(value) for name, value in found}

    def is_idle(self) -> bool:
        text = self.client.get("/metrics").text
        return all(metric(text, name) == 0 for name in ("kiln_engine_running", "kiln_engine_waiting"))

    def wait_idle(self) -> None:
        wait_until(self.is_idle, "the engine is idle")


def chat_body(content: str = PROMPT, /, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}


def metric(text: str, name: str, **labels: str) -> float:
    shown = ",".join(f'{key}="{value}"' for key, value in labels.items())
    line = re.escape(f"{name}{{{shown}}}" if labels else name)
    (value,) = re.findall(rf"^{line} (\S+)$", text, re.M)
    return float(value)


def wait_until(is_true: Callable[[], bool], what: str, within_s: float = WAIT_S) -> None:
    """Poll. The limit only says that something hangs."""
    deadline = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < deadline, f"still not so after {within_s:g} s: {what}"
        time.sleep(0.01)


def settings_of(**values: Any) -> Settings:
    """Settings with some keys set as a file would: `settings_of(engine__parallel=2)`.

    One compute thread is enough for the small model, and on a busy machine two would wait for each other.
    """
    named = {"engine.threads": 1} | {name.replace("__", "."): value for name, value in values.items()}
    return Settings.build(named, dict.fromkeys(named, "file"))


@contextmanager
def serving(app: Starlette, settings: Settings) -> Iterator[Server]:
    """Run an application under uvicorn on a free port of loopback, as `kiln serve` does."""
    with serve_app(app, protocol_within(settings.server, app)) as url, traffic.client(url) as client:
        yield Server(url, client, app)


@contextmanager
def serving_model(settings: Settings | None = None, /, **values: Any) -> Iterator[Server]:
    """The bundled model, or that of `model__path`, under some settings."""
    settings = settings_of(**values) if settings is None else settings
    with serving(create_app(settings), settings) as server:
        yield server
