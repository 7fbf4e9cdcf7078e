"""Every response is counted by its class, and every turn that was refused by its code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kiln.core.errors import EngineFailed
from kiln.http.app import ROUTES
from kiln.http.counting import TURNS
from servers import traffic
from servers.raw import posted
from servers.scripted import Stage, Staged, staging
from servers.server import Server, chat_body, wait_until

OPENAI = "/v1/openai/chat/completions"
NATIVE = "/lmkit/v1/chat"
MESSAGES = [{"role": "user", "content": "hi"}]
NO_MODEL = b'{"messages": [{"role": "user", "content": "hi"}], "model": "none"}'


def counted(server: Server, name: str, label: str) -> Counter[str]:
    """A counter's values by one label."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        for sample in family.samples:
            if sample.name == name:
                found[sample.labels[label]] += int(sample.value)
    return found


def refused(server: Server) -> Counter[str]:
    return counted(server, "kiln_refused_turns_total", "code")


def statuses(server: Server) -> Counter[str]:
    return counted(server, "kiln_http_responses_total", "status")


def ends(server: Server) -> Counter[str]:
    return counted(server, "kiln_completions_total", "finish_reason")


def crash(*_: object) -> Any:
    raise RuntimeError("a scripted defect")


@pytest.fixture(scope="module")
def tight() -> Iterator[Staged]:
    """One request may run and none may wait."""
    with staging(engine__parallel=1, engine__max_queue=0, engine__request_timeout_s=2.0) as staged:
        yield staged


@pytest.mark.parametrize("path", [traffic.CHAT, OPENAI, NATIVE])
def test_a_defect_is_counted(scripted_server: Server, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    before, was_refused = statuses(scripted_server), refused(scripted_server)
    monkeypatch.setattr(scripted_server.app.state.kiln.service, "prepare", crash)
    response = scripted_server.client.post(path, json={"messages": MESSAGES})
    assert response.status_code == 500
    assert statuses(scripted_server)["5xx"] == before["5xx"] + 1
    assert refused(scripted_server) - was_refused == {"internal_error": 1}


def test_a_defect_of_another_route_is_no_refused_turn(
    scripted_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, was_refused = statuses(scripted_server), refused(scripted_server)
    monkeypatch.setattr(scripted_server.app.state.kiln.statistics, "recent_requests", crash)
    assert scripted_server.client.get("/v1/stats/recent-requests").status_code == 500
    assert statuses(scripted_server)["5xx"] == before["5xx"] + 1
    assert refused(scripted_server) == was_refused


@pytest.mark.parametrize(
    "path, body, code",
    [
        (traffic.CHAT, b"{", "invalid_json"),
        (OPENAI, b"{}", "invalid_field"),
        (NATIVE, b"{}", "invalid_field"),
        (traffic.CHAT, NO_MODEL, "model_not_found"),
        (NATIVE, NO_MODEL, "model_not_found"),
        ("/v1/completions", b'{"prompt": "", "max_tokens": 0, "prompt_logprobs": 1}', "empty_prompt"),
        ("/v1/completions/batch", b'{"prompts": []}', "invalid_field"),
        ("/v1/openai/completions", b'{"prompt": []}', "invalid_field"),
    ],
)
def test_what_a_request_is_refused_for_is_counted_once(
    scripted_server: Server, path: str, body: bytes, code: str
) -> None:
    before = refused(scripted_server)
    headers = {"content-type": "application/json"}
    response = httpx.post(scripted_server.url + path, content=body, headers=headers)
    assert 400 <= response.status_code < 500, response.text
    assert refused(scripted_server) - before == {code: 1}


def test_what_is_no_turn_is_not_counted(scripted_server: Server) -> None:
    before = refused(scripted_server)
    url = scripted_server.url
    assert httpx.get(url + traffic.CHAT).status_code == 405
    assert httpx.post(f"{url}/v1/chat/completion", json={}).status_code == 404
    assert httpx.post(f"{url}/v1/openai/tokenize", json={}).status_code == 400
    assert refused(scripted_server) == before


@pytest.mark.parametrize("path", [traffic.CHAT, OPENAI, NATIVE, "/v1/openai/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_full_queue_is_counted(tight: Staged, path: str, stream: bool) -> None:
    server, stage = tight.server, tight.stage
    stage.clear()
    stage.repeat("a")
    stage.pace_s = 0.005
    before = refused(server)
    asked = {"prompt": "hi"} if path.endswith("i/completions") else {"messages": MESSAGES}
    with posted(server.url, traffic.CHAT, chat_body(max_tokens=4000)):
        wait_until(lambda: server.metric("kiln_engine_running") == 1, "the request runs")
        response = httpx.post(server.url + path, json={**asked, "stream": stream}, timeout=60)
        assert response.status_code == 429, response.text
    assert refused(server) - before == {"queue_full": 1}
    server.wait_idle()


def fail() -> int:
    raise EngineFailed("a scripted failure")


@pytest.mark.parametrize("path", [traffic.CHAT, OPENAI, NATIVE])
@pytest.mark.parametrize("stream", [True, False])
def test_a_turn_that_began_is_no_refused_one(
    scripted_server: Server, stage: Stage, path: str, stream: bool
) -> None:
    stage.say([fail])
    before, ended = refused(scripted_server), ends(scripted_server)
    body = {"messages": MESSAGES, "stream": stream}
    response = httpx.post(scripted_server.url + path, json=body, timeout=60)
    assert response.status_code == 503 or '"code":"engine_failed"' in response.text
    assert ends(scripted_server) - ended == {"error": 1}
    assert refused(scripted_server) == before


def test_a_scoring_that_began_is_no_refused_turn(tight: Staged, monkeypatch: pytest.MonkeyPatch) -> None:
    server = tight.server
    service = server.app.state.kiln.service
    submit = service.engine.submit

    def submit_and_fail(request: object) -> object:
        generation = submit(request)
        generation.cancel(EngineFailed("a scripted failure"))
        return generation

    monkeypatch.setattr(service.engine, "submit", submit_and_fail)
    before = refused(server)
    body = {"prompt": "hi there", "max_tokens": 0, "prompt_logprobs": 1}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 503, response.text
    assert refused(server) == before


def test_turns_are_counted_on_routes_that_there_are() -> None:
    assert {route.path for route in ROUTES if "POST" in (route.methods or ())} >= TURNS
