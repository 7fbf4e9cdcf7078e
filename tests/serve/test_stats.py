"""Recent requests, the decode window, and the metrics that go with them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import pytest

from contract.validators import validate
from kiln.chat.telemetry import stats
from kiln.cli.embedded import embedded_server
from kiln.core.settings import Settings


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with embedded_server(Settings.default()) as base:
        yield base


def ask(url: str, content: str = "3+8-2+7=?", **fields: object) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


def recent(url: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = httpx.get(f"{url}/v1/stats/recent-requests").json()["requests"]
    return found


def test_recent_requests_tell_outcomes_and_no_text(url: str) -> None:
    assert ask(url, thinking_budget_tokens=4).status_code == 200
    entry = recent(url)[0]
    record = entry["thinking_budget"]
    assert validate("recentRecord", record) == []
    assert isinstance(record, dict)
    assert (record["applied"], record["trigger"], record["thinking_tokens"]) == (True, "tokens", 4)
    assert entry["finish_reason"] == "stop"
    latency = entry["latency"]
    assert isinstance(latency, dict) and latency["total_ms"] >= latency["ttft_ms"] > 0
    assert latency["queue_ms"] >= 0 and latency["admission_ms"] >= 0
    schemas = httpx.get(f"{url}/openapi.json").json()["components"]["schemas"]
    described = schemas["RecentRequests"]["properties"]["requests"]["items"]["properties"]
    assert set(entry) <= set(described)
    assert set(latency) == set(described["latency"]["properties"])
    assert "3+8" not in httpx.get(f"{url}/v1/stats/recent-requests").text


def test_an_inert_budget_has_no_outcome_fields(url: str) -> None:
    ask(url, thinking_budget_tokens=4, chat_template_kwargs={"enable_thinking": False})
    record = recent(url)[0]["thinking_budget"]
    assert record == {
        "configured": True,
        "applied": False,
        "max_tokens": 4,
        "tokens_source": "request",
        "time_source": "unlimited",
    }


def test_a_refused_turn_has_no_applied(url: str) -> None:
    response = ask(url, thinking_budget_tokens=4, stop="</think>")
    assert response.status_code == 400
    entry = recent(url)[0]
    assert entry["error"] == "stop_overlaps_thinking_close"
    assert isinstance(entry["thinking_budget"], dict) and "applied" not in entry["thinking_budget"]
    assert validate("recentRecord", entry["thinking_budget"]) == []


def test_the_ring_is_bounded(url: str) -> None:
    for _ in range(300):
        ask(url, model="no such model")
    assert len(recent(url)) == 256


def test_the_decode_window_has_ordered_percentiles(url: str) -> None:
    ask(url)
    window = httpx.get(f"{url}/v1/stats/decode").json()
    assert window["gaps"] > 0
    assert 0 < window["itl_ms_p50"] <= window["itl_ms_p90"] <= window["itl_ms_p99"] <= window["max_itl_ms"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(stats, "time", clock)
    return clock


def test_the_decode_window_forgets_after_a_minute(clock: SimpleNamespace) -> None:
    statistics = stats.Statistics()
    statistics.token_gaps(array("d", [0.5, 0.5]), 1000.0)
    statistics.token_gaps(array("d", [0.25]), 1030.0)
    clock.now = 1050.0
    assert statistics.decode_window()["gaps"] == 3
    clock.now = 1070.0
    window = statistics.decode_window()
    assert (window["gaps"], window["max_itl_ms"], window["truncated"]) == (1, 250.0, False)


def test_gaps_that_are_told_late_are_as_old_as_they_are(clock: SimpleNamespace) -> None:
    statistics = stats.Statistics()
    statistics.token_gaps(array("d", [0.25]), 1030.0)
    statistics.token_gaps(array("d", [0.5, 0.5]), 1000.0)
    clock.now = 1070.0
    window = statistics.decode_window()
    assert (window["gaps"], window["max_itl_ms"]) == (1, 250.0)


def test_the_decode_window_is_bounded_and_says_so(clock: SimpleNamespace) -> None:
    statistics = stats.Statistics()
    for second in range(20):
        statistics.token_gaps(array("d", [0.001] * 4000), 1000.0 + second)
    clock.now = 1020.0
    window = statistics.decode_window()
    assert (window["gaps"], window["truncated"]) == (64000, True)
    # Those that were dropped would have left the window by now.
    clock.now = 1064.0
    assert statistics.decode_window()["truncated"] is False


def test_repeated_prompts_show_in_the_prefix_cache_metrics(url: str) -> None:
    def cached() -> float:
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        name = "kiln_prompt_tokens_cached_total "
        return float(next(line.split()[1] for line in lines if line.startswith(name)))

    ask(url, "Please work out 4+5-3+8-6=?")
    before = cached()
    ask(url, "Please work out 4+5-3+8-6=?")
    assert cached() > before
    assert recent(url)[0]["cached_tokens"] == cached() - before
