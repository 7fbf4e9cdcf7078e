"""Completions cut by their time or by a client that left are told of in metrics and statistics."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kiln.core.errors import EngineFailed, RequestTimedOut
from servers import traffic
from servers.raw import posted
from servers.scripted import Stage, Staged, staging
from servers.server import Server, chat_body, wait_until


@pytest.fixture(scope="module")
def hasty() -> Iterator[Staged]:
    """One request at a time runs, and has a second from its arrival."""
    with staging(engine__parallel=1, engine__request_timeout_s=1.0) as staged:
        yield staged


@pytest.fixture
def slow(hasty: Staged) -> Iterator[Stage]:
    """Its model speaks for ever, 100 tokens a second."""
    for stage in hasty.cleared():
        stage.repeat("a")
        stage.pace_s = 0.01
        yield stage


def last_request(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.client.get("/v1/stats/recent-requests").json()["requests"][0]
    return found


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_whose_time_is_over(hasty: Staged, slow: Stage, stream: bool) -> None:
    server = hasty.server
    tokens = server.metric("kiln_generated_tokens_total")
    firsts = server.metric("kiln_time_to_first_token_seconds_count")
    server.post(max_tokens=4000, stream=stream)
    entry = last_request(server)
    assert (entry["finish_reason"], entry["error"]) == ("error", "request_timed_out")
    assert entry["completion_tokens"] > 0
    assert 0 < entry["latency"]["ttft_ms"] < entry["latency"]["total_ms"]
    assert entry["latency"]["admission_ms"] is not None
    # What the engine spent on it was not told.
    assert entry["latency"]["decode_ms"] is None
    assert server.metric("kiln_generated_tokens_total") == tokens + entry["completion_tokens"]
    assert server.metric("kiln_time_to_first_token_seconds_count") == firsts + 1


def test_a_client_that_left(hasty: Staged, slow: Stage) -> None:
    server = hasty.server
    tokens = server.metric("kiln_generated_tokens_total")
    ended = len(server.client.get("/v1/stats/recent-requests").json()["requests"])
    with posted(server.url, traffic.CHAT, chat_body(stream=True, max_tokens=4000)) as connection:
        received = b""
        while received.count(b"data: ") < 20:
            received += connection.recv(65536)
    requests = "/v1/stats/recent-requests"
    wait_until(lambda: len(server.client.get(requests).json()["requests"]) > ended, "it is told")
    entry = last_request(server)
    assert entry["finish_reason"] == "cancelled"
    assert entry["completion_tokens"] >= 15
    assert entry["latency"]["ttft_ms"] > 0
    assert server.metric("kiln_generated_tokens_total") == tokens + entry["completion_tokens"]


def test_a_failed_step_tells_what_had_been_generated(hasty: Staged, slow: Stage) -> None:
    def fail() -> int:
        raise EngineFailed("a scripted failure")

    slow.say("a", "b", [fail])
    server = hasty.server
    tokens = server.metric("kiln_generated_tokens_total")
    before = last_request(server)
    server.post(max_tokens=4000)
    entry = last_request(server)
    assert entry != before and entry["finish_reason"] == "error"
    assert entry["completion_tokens"] >= 1
    assert server.metric("kiln_generated_tokens_total") == tokens + entry["completion_tokens"]


@pytest.mark.parametrize("path", [traffic.CHAT, "/lmkit/v1/chat", "/v1/completions"])
def test_a_request_that_only_waited(hasty: Staged, slow: Stage, path: str) -> None:
    server, release, reached = hasty.server, threading.Event(), threading.Event()

    def hold() -> int:
        reached.set()
        assert release.wait(60)
        return slow.end

    slow.say([hold])
    asked: dict[str, Any] = {"messages": chat_body()["messages"], "max_tokens": 4}
    if path == "/v1/completions":
        asked = {"prompt": "hi there", "max_tokens": 0, "prompt_logprobs": 1}
    try:
        with posted(server.url, traffic.CHAT, chat_body()):
            assert reached.wait(60)
            response = server.client.post(path, json=asked)
    finally:
        release.set()
    assert response.status_code == 504, response.text
    assert "for a place, and had none when its 1 seconds were over" in response.text
    assert "engine.parallel" in response.text and "fewer tokens" not in response.text
    if path != "/v1/completions":
        entry = last_request(server)
        assert entry["completion_tokens"] == 0 and entry["latency"]["ttft_ms"] is None
        assert entry["latency"]["admission_ms"] > 0


def test_a_request_that_waited_for_most_of_its_time(hasty: Staged, slow: Stage) -> None:
    server = hasty.server
    with posted(server.url, traffic.CHAT, chat_body(max_tokens=4000)):
        wait_until(lambda: server.metric("kiln_engine_running") == 1, "the other one runs")
        # The other one's time is over so much earlier.
        time.sleep(0.3)
        response = server.post(max_tokens=4000)
    assert response.status_code == 504, response.text
    error = response.json()["error"]
    assert error["message"].startswith("the request ran for more than 1 seconds, of which it waited")
    assert "engine.parallel" in error["hint"]


def test_hints_fit_what_took_the_time() -> None:
    ran, queued, both = (RequestTimedOut.after(6, waited_s=waited) for waited in (0.1, 5.0, 2.0))
    assert ran.message == "the request ran for more than 6 seconds"
    assert ran.hint is not None and "fewer tokens" in ran.hint
    assert queued.hint is not None and "engine.parallel" in queued.hint
    assert "waited 2.0 for a place" in both.message and both.hint == ran.hint
