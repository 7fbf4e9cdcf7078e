"""Bodies of all sorts are answered or refused, never failed; who leaves frees everything; priority."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import msgspec
import pytest

from kiln.wire import openai_chat, openai_text
from servers.scripted import Stage
from servers.server import PROMPT, wait_until

from .conftest import ADD, Profile

DEEP: Any = "x"
for _ in range(200):
    DEEP = [DEEP]
VALUES: list[Any] = [
    *(None, True, -1, 0, 3, 2**70, 1.5, 1e300, "", "x", "\ud83d", "none", "auto"),
    *([], {}, [[]], [None], ["x"], [1], {"a": {}}, {"type": "x"}, {"type": "function"}, [{}], DEEP),
]
BODIES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "chat/completions": (
        openai_chat.ChatRequest,
        {"messages": [{"role": "user", "content": PROMPT}], "max_completion_tokens": 2},
    ),
    "completions": (openai_text.TextRequest, {"prompt": "1+1=", "max_tokens": 2}),
    "embeddings": (openai_text.EmbeddingRequest, {"input": "a"}),
    "tokenize": (openai_text.TokenizeRequest, {"prompt": "a"}),
    "detokenize": (openai_text.DetokenizeRequest, {"tokens": [1]}),
}


@pytest.mark.parametrize("path", sorted(BODIES))
def test_any_value_in_any_field(profile: Profile, path: str) -> None:
    struct, valid = BODIES[path]
    for field in msgspec.structs.fields(struct):
        for value in VALUES:
            response = profile.post(path, **{**valid, field.encode_name: value})
            assert response.status_code < 500, (field.name, value, response.text)
            if response.status_code == 400:
                assert response.json()["error"]["message"]


@pytest.mark.parametrize("key", ["role", "content", "tool_calls", "name", "tool_call_id"])
def test_any_value_in_a_message(profile: Profile, key: str) -> None:
    for value in VALUES:
        for role in ("user", "assistant", "tool"):
            message = {"role": role, "content": "3+8=?", "tool_call_id": "x", key: value}
            response = profile.chat(messages=[message], max_tokens=1)
            assert response.status_code < 500, (value, response.text)


@pytest.mark.parametrize("key", ["parameters", "name", "description", "strict"])
def test_any_value_in_a_tool(profile: Profile, key: str) -> None:
    schemas: list[Any] = [
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}},
        {"$ref": "#"},
        {"type": "object", "properties": {"a": {"pattern": "("}}},
        {"type": "array"},
        {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/x"}}},
    ]
    for value in (*VALUES, *schemas):
        for choice in ("auto", "required"):
            tool = {"type": "function", "function": {**ADD["function"], key: value}}
            response = profile.chat("Add 3 and 4.", tools=[tool], tool_choice=choice, max_tokens=40)
            assert response.status_code < 500, (value, response.text)


def test_bodies_that_are_none(profile: Profile) -> None:
    client = profile.server.client
    for path in BODIES:
        for content in (b"", b"{", b"[]", b"null", b'"x"', b"\xff", b"[" * 5000):
            response = client.post(
                f"/v1/openai/{path}", content=content, headers={"content-type": "application/json"}
            )
            assert response.status_code == 400, (path, content[:10])
        assert client.post(f"/v1/openai/{path}", content=b"{}").status_code == 415
        assert client.get(f"/v1/openai/{path}").status_code == 405


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 3}),
        ("completions", {"prompt": ["a", "b", "c"], "n": 2}),
    ],
)
def test_a_client_that_goes_frees_everything(
    acted: Profile, stage: Stage, path: str, body: dict[str, Any]
) -> None:
    stage.repeat("word ")
    stage.pace_s = 0.002
    url = f"{acted.server.url}/v1/openai/{path}"
    body = {**body, "max_tokens": 4000}
    with httpx.Client(timeout=30) as client:
        with client.stream("POST", url, json={**body, "stream": True}) as response:
            next(response.iter_lines())
        with pytest.raises(httpx.ReadTimeout):
            client.post(url, json=body, timeout=0.3)
    acted.server.wait_idle()


def test_priority_requests_are_admitted_first(narrow: tuple[Profile, Stage]) -> None:
    profile, stage = narrow
    stage.repeat("word ")
    stage.pace_s = 0.005
    ended: list[str] = []
    lock = threading.Lock()

    def ask(name: str, tokens: int, tier: str) -> None:
        body = profile.ask(max_tokens=tokens, service_tier=tier, reasoning_effort="none", temperature=0)
        with lock:
            ended.append(name)
        assert body["service_tier"] == tier

    def waiting(count: int) -> bool:
        return profile.server.metric("kiln_engine_waiting") == count

    threads = [threading.Thread(target=ask, args=("running", 200, "default"))]
    threads[0].start()
    wait_until(lambda: profile.server.metric("kiln_engine_running") == 1, "one request runs")
    for number, (name, tier) in enumerate([("patient", "default"), ("urgent", "priority")], start=1):
        threads.append(threading.Thread(target=ask, args=(name, 20, tier)))
        threads[-1].start()
        wait_until(lambda number=number: waiting(number), f"{name} waits")  # type: ignore[misc]
    for thread in threads:
        thread.join(60)
    assert ended == ["running", "urgent", "patient"]
