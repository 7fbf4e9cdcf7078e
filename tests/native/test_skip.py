"""Skipping the thinking of a running exchange."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

import pytest

from servers import traffic
from servers.raw import answered
from servers.scripted import Stage
from servers.server import chat_body

from .api import CHAT, SKIP, Event, Native, native_body


def test_the_answer_follows(scripted: Native, stage: Stage) -> None:
    stage.repeat("1")
    stage.pace_s = 0.005
    before = scripted.server.outcomes()["interrupted"]
    events: list[Event] = []
    with scripted.streaming(request_id="mine", max_tokens=3000, thinking_budget_tokens=2500) as arriving:
        for event in arriving:
            events.append(event)
            thoughts = sum(n == "delta" and e["t"] == "thinking" for n, e in events)
            if thoughts == 4 and event[1].get("t") == "thinking":
                accepted = scripted.skip("mine")
                assert (accepted.status_code, accepted.json()) == (202, {"status": "accepted"})
            if event[0] == "delta" and event[1]["t"] == "text":
                stage.loop = []  # the answer has begun; let it end
    name, done = events[-1]
    assert name == "done"
    record = done["thinking_budget"]
    assert (record["applied"], record["triggered"], record["closed"]) == (True, False, True)
    assert "trigger" not in record
    assert 4 <= record["thinking_tokens"] < 2500
    assert done["text"].startswith("1")
    assert scripted.server.outcomes()["interrupted"] == before + 1


def test_on_the_real_model(native: Native) -> None:
    before = native.server.outcomes()["interrupted"]
    with native.streaming("Think forever.", request_id="real", max_tokens=1500) as arriving:
        names = []
        for name, payload in arriving:
            names.append(payload["t"] if name == "delta" else name)
            if names.count("thinking") == 3 and names[-1] == "thinking":
                assert native.skip("real").status_code == 202
    assert names[-1] == "done"
    assert native.server.outcomes()["interrupted"] == before + 1


def test_by_chat_completion_id(scripted: Native, stage: Stage) -> None:
    stage.repeat("1")
    stage.pace_s = 0.005
    body = chat_body(stream=True, max_tokens=200)
    with scripted.server.client.stream("POST", traffic.CHAT, json=body) as response:
        seen = b""
        for part in response.iter_raw():
            if b'"id":"' not in seen:
                chat_id = part.split(b'"id":"')[1].split(b'"')[0].decode()
                assert scripted.skip(chat_id).status_code == 202
            seen += part
    assert b'"content":"1' in seen
    assert scripted.skip(chat_id).status_code == 404


def test_once_the_answer_began_it_does_nothing(scripted: Native, stage: Stage) -> None:
    stage.say("a", "</think>", "\n\n")
    stage.repeat("1")
    stage.pace_s = 0.005
    with scripted.streaming(request_id="late", max_tokens=60) as arriving:
        seen: Counter[str] = Counter()
        for name, payload in arriving:
            seen[payload.get("t", name)] += 1
            if seen["text"] == 2 and name == "delta":
                assert scripted.skip("late").status_code == 202
    assert name == "done"
    assert payload["text"] == "1" * 57
    assert payload["thinking_tokens"] == 1


def test_a_finished_exchange_is_gone_when_its_summary_is_read(native: Native) -> None:
    with native.streaming(request_id="again") as arriving:
        for name, _ in arriving:
            if name == "done":
                assert native.skip("again").status_code == 404
    # And its name is free.
    assert native.ask(request_id="again")["result"]["reason"] == "stop"
    assert native.skip("again").json()["code"] == "exchange_not_found"


def test_a_refused_exchange_leaves_its_name_free(native: Native) -> None:
    for _ in range(2):
        assert native.refuse(status=404, request_id="r", model="nobody")["code"] == "model_not_found"
        assert native.refuse("1" * 30000, request_id="r")["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_a_name_belongs_to_one_running_exchange(scripted: Native, stage: Stage, stream: bool) -> None:
    stage.repeat("1")
    stage.pace_s = 0.01
    with scripted.streaming(request_id="twice", max_tokens=3000) as arriving:
        next(arriving)
        error = scripted.refuse(status=409, request_id="twice", stream=stream)
        assert error["code"] == "request_id_in_use"
        assert "request_id" in error["error"] and "twice" in error["error"]
        # The first one is still the one that is found.
        assert scripted.skip("twice").status_code == 202
    scripted.server.wait_idle()
    stage.loop = []
    assert scripted.ask(request_id="twice")["result"]["reason"] == "stop"


def test_wrong_requests(native: Native) -> None:
    assert native.skip("unknown").status_code == 404
    assert native.skip("chatcmpl-unknown").status_code == 404
    assert native.skip(None).status_code == 400
    assert native.skip(7).status_code == 400
    missing = native.server.client.post(SKIP, json={})
    assert missing.status_code == 400
    assert "request_id" in missing.json()["error"]
    assert native.server.client.get(SKIP).status_code == 405


async def test_a_thousand_at_once(scripted: Native, stage: Stage) -> None:
    """Half for a running exchange, half for none; the exchange closes its thinking once and goes on."""
    stage.repeat("1")
    stage.pace_s = 0.02
    url = scripted.server.url
    running = native_body(request_id="crowd", stream=True, max_tokens=100_000)
    answer = asyncio.create_task(answered(url, CHAT, running))
    while scripted.server.is_idle():
        await asyncio.sleep(0.01)

    async def skip(i: int) -> str:
        name = "crowd" if i % 2 else f"nobody-{i}"
        raw = await answered(url, SKIP, {"request_id": name})
        return raw.split()[1].decode()

    statuses = Counter(await asyncio.gather(*(skip(i) for i in range(1000))))
    stage.loop = []
    raw = (await answer).decode()
    assert statuses == {"202": 500, "404": 500}
    assert raw.count("event: done") == 1
    # The thinking, which the script never ends, was closed.
    assert raw.count('"t":"text"') > 0


def test_of_all_alternatives(scripted: Native, stage: Stage) -> None:
    stage.repeat("1")
    stage.pace_s = 0.005
    with scripted.streaming(request_id="three", n=3, max_tokens=60) as arriving:
        events = [next(arriving)]
        assert scripted.skip("three").status_code == 202
        events += arriving
    name, done = events[-1]
    assert name == "done"
    assert all(choice["text"].startswith("1") for choice in done["choices"])


def test_before_the_first_token(scripted: Native, stage: Stage) -> None:
    begun, go = threading.Event(), threading.Event()

    def wait() -> int:
        begun.set()
        go.wait(60)
        return stage.token("1")

    stage.say([wait], "2")
    with scripted.streaming(request_id="early") as arriving:
        assert begun.wait(60)
        assert scripted.skip("early").status_code == 202
        go.set()
        *_, (name, done) = arriving
    assert name == "done"
    assert (done["thinking_tokens"], done["text"]) == (0, "2")
