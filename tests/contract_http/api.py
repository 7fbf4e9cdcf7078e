"""A checked client of the three completion routes. Every answer is held against the contract."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from contract.validators import stream_events, validate, validate_chat_stream, validate_error
from kiln.engine.ports import EngineStats
from servers.server import Server, serving_model

CHAT = "/v1/chat/completions"
BATCH = "/v1/completions/batch"
SCORE = "/v1/completions"
RESPONSES = {
    CHAT: "ChatCompletionResponse",
    BATCH: "BatchCompletionResponse",
    SCORE: "TextCompletionResponse",
}
PROMPT = "3+8-2+7=?"

Body = dict[str, Any]
# Sampling whose log-probabilities are the raw ones: nothing truncated, nothing penalised.
UNTRUNCATED: Body = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0}


@dataclass(frozen=True)
class Api:
    """A running server and short ways to ask it."""

    server: Server

    def send(self, path: str, body: object) -> httpx.Response:
        """Post a JSON body. What comes back keeps the contract, whatever it is."""
        response = self.server.client.post(path, json=body)
        check(path, response)
        return response

    def whole(self, path: str, body: Body) -> Body:
        response = self.send(path, body)
        assert response.status_code == 200, response.text
        answer: Body = response.json()
        return answer

    def refuse(self, path: str, body: object, status: int = 400) -> Body:
        """The error of a request that must be refused."""
        response = self.send(path, body)
        assert response.status_code == status, response.text[:400]
        error: Body = response.json()["error"]
        return error

    def chat(self, content: str = PROMPT, /, **fields: Any) -> Body:
        return self.whole(CHAT, {"messages": say(content), "temperature": 0, **fields})

    def refuse_chat(self, content: str = PROMPT, /, **fields: Any) -> Body:
        return self.refuse(CHAT, {"messages": say(content), **fields})

    def stream(self, content: str = PROMPT, /, **fields: Any) -> list[Body]:
        """The decoded events of a checked stream."""
        body = {"messages": say(content), "temperature": 0, "stream": True, **fields}
        response = self.server.client.post(CHAT, json=body)
        assert response.status_code == 200, response.text
        performance = fields.get("include_performance")
        assert validate_chat_stream(response.content, include_performance=performance) == []
        return stream_events(response.content)

    def batch(self, *contents: str, **fields: Any) -> Body:
        return self.whole(BATCH, {"prompts": [say(c) for c in contents], "temperature": 0, **fields})

    def score(self, prompt: str | list[int], top_k: int = 0, /, **fields: Any) -> Body:
        return self.whole(SCORE, {"prompt": prompt, "prompt_logprobs": top_k, **fields})

    def rollout(self, content: str = PROMPT, /, **fields: Any) -> tuple[Body, Body]:
        """The choice of a provenance rollout, and its record."""
        answer = self.chat(content, rollout_provenance=True, **fields)
        (choice,) = answer["choices"]
        record: Body = choice["rollout_provenance"]
        assert len(record["action_tokens"]) == answer["usage"]["completion_tokens"]
        assert record["prompt_token_count"] == answer["usage"]["prompt_tokens"]
        return choice, record

    @property
    def service(self) -> Any:
        return self.server.app.state.kiln.service

    @property
    def stats(self) -> EngineStats:
        stats: EngineStats = self.service.engine.stats()
        return stats

    @property
    def pieces(self) -> list[bytes]:
        """The bytes of every token."""
        pieces: list[bytes] = self.service.model.tokenizer.pieces
        return pieces


@contextmanager
def model_api(**settings: Any) -> Iterator[Api]:
    """The bundled model, or that of `model__path`, under some settings; nothing is answered from memory."""
    with serving_model(**{"engine__completion_cache": 0, **settings}) as server:
        yield Api(server)


def check(path: str, response: httpx.Response) -> None:
    body = response.json()
    if response.status_code == 200:
        assert validate(RESPONSES[path], body) == []
    else:
        assert validate_error(body) == []
        assert response.status_code != 500, body


def say(content: str) -> list[Body]:
    return [{"role": "user", "content": content}]


def observed(scored: Body, ids: list[int]) -> list[float | None]:
    """The log-probability of each token that stands in a scored prompt; None for the first."""
    entries = scored["choices"][0]["prompt_logprobs"]
    assert len(entries) == len(ids)
    return [None if e is None else e[str(i)]["logprob"] for e, i in zip(entries, ids, strict=True)]


def texts(answer: Body) -> list[tuple[str | None, str]]:
    """Reasoning and content of every choice of a chat, or of every item of a batch."""
    if "completions" in answer:
        return [(item.get("reasoning_content"), item["text"]) for item in answer["completions"]]
    messages = [choice["message"] for choice in answer["choices"]]
    return [(message.get("reasoning_content"), message["content"]) for message in messages]
