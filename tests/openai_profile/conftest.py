"""Servers and clients of this folder. Every answer is held against the contract while it is received."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from servers import traffic
from servers.fixtures import contract_kept, stage, staged
from servers.scripted import Stage, Staged, staging
from servers.server import PROMPT, Server, Streamed, serving_model

__all__ = ["contract_kept", "stage", "staged"]

MODEL = "tiny-reasoner"
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


@dataclass(frozen=True)
class Profile:
    """A running server, asked under `/v1/openai`."""

    server: Server

    def post(self, path: str, /, **body: Any) -> httpx.Response:
        # As escapes, so that lone surrogates can be sent.
        content = json.dumps(body).encode("ascii")
        headers = {"content-type": "application/json"}
        return self.server.client.post(f"/v1/openai/{path}", content=content, headers=headers)

    def chat(self, content: str = PROMPT, /, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return self.post("chat/completions", **{"messages": messages, "temperature": 0, **fields})

    def ask(self, content: str = PROMPT, /, **fields: Any) -> Any:
        response = self.chat(content, **fields)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, content: str = PROMPT, /, **fields: Any) -> Streamed:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        response = self.chat(content, **{**options, **fields})
        assert response.status_code == 200, response.text
        return Streamed.parse(response.content)

    def refuse(self, path: str = "chat/completions", /, **body: Any) -> Any:
        if path == "chat/completions":
            body = {"messages": [{"role": "user", "content": PROMPT}], **body}
        response = self.post(path, **body)
        assert response.status_code == 400, response.text
        return response.json()["error"]


@pytest.fixture(scope="session")
def profile_server() -> Iterator[Server]:
    """The bundled model, with small efforts and prices."""
    with serving_model(
        server__reasoning_low_tokens=8,
        server__reasoning_medium_tokens=24,
        server__reasoning_high_tokens=None,
        openai__price_prompt=1.0,
        openai__price_cached_prompt=0.25,
        openai__price_completion=4.0,
    ) as running:
        yield running


@pytest.fixture
def profile(profile_server: Server) -> Profile:
    return Profile(profile_server)


@pytest.fixture
def acted(staged: Staged, stage: Stage) -> Profile:
    """A server whose model says what `stage` tells it."""
    return Profile(staged.server)


@pytest.fixture(scope="session")
def narrow() -> Iterator[tuple[Profile, Stage]]:
    """A scripted server with room for one sequence."""
    with staging(engine__parallel=1) as staged:
        yield Profile(staged.server), staged.stage


@pytest.fixture
def client(profile_server: Server) -> Iterator[openai.OpenAI]:
    with traffic.client("") as http_client:
        yield openai.OpenAI(
            base_url=f"{profile_server.url}/v1/openai",
            api_key="none",
            http_client=http_client,  # type: ignore[arg-type]
            max_retries=0,
        )
