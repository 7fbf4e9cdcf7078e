"""What can never have its places is the request's fault in every dialect: trying again would not help."""

from __future__ import annotations

from typing import Any

import pytest

from servers import traffic
from servers.server import Server, serving_model

MESSAGES = [{"role": "user", "content": "hi"}]
# Two may run and eight wait.
PLACES = 10


@pytest.mark.parametrize(
    "path, body, param",
    [
        (traffic.CHAT, {"messages": MESSAGES, "n": 11}, "n"),
        ("/v1/completions/batch", {"prompts": [MESSAGES], "n": 11}, "n"),
        ("/v1/completions/batch", {"prompts": [MESSAGES] * 11}, "prompts"),
        ("/v1/completions/batch", {"prompts": [MESSAGES] * 6, "n": 2}, "prompts"),
        ("/v1/openai/chat/completions", {"messages": MESSAGES, "n": 11}, "n"),
        ("/v1/openai/completions", {"prompt": "hi", "n": 11}, "n"),
        ("/v1/openai/completions", {"prompt": ["hi"] * 11}, "prompt"),
        ("/v1/openai/completions", {"prompt": "hi", "n": 10, "echo": True, "logprobs": 1}, "echo"),
    ],
)
def test_more_than_will_ever_fit(narrow_server: Server, path: str, body: dict[str, Any], param: str) -> None:
    response = narrow_server.client.post(path, json={"max_tokens": 2, **body})
    assert response.status_code == 400, response.text
    assert "retry-after" not in response.headers
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_field", param)
    assert str(PLACES) in error["message"]
    assert "engine.max_queue" in error["hint"]


def test_alternatives_that_will_never_fit() -> None:
    with serving_model(engine__parallel=1, engine__max_queue=1) as server:
        response = server.client.post("/lmkit/v1/chat", json={"messages": MESSAGES, "n": 3, "max_tokens": 2})
        assert response.status_code == 400, response.text
        assert "`n`" in response.json()["error"]


@pytest.mark.parametrize(
    "path, body",
    [
        (traffic.CHAT, {"messages": MESSAGES, "n": PLACES}),
        ("/v1/completions/batch", {"prompts": [MESSAGES] * 5, "n": 2}),
        ("/v1/openai/completions", {"prompt": ["hi"] * 5, "n": 1, "echo": True, "logprobs": 1}),
    ],
)
def test_all_the_places_there_are(narrow_server: Server, path: str, body: dict[str, Any]) -> None:
    narrow_server.wait_idle()
    response = narrow_server.client.post(path, json={"max_tokens": 2, **body})
    assert response.status_code == 200, response.text
