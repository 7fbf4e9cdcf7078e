"""Performance metadata and token timings on a real server."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from servers.scripted import Stage

from .api import Api, Body, model_api
from .test_batch import Load

MARKS = ("ready_ms", "producer_delivered_ms", "handler_received_ms", "body_enqueued_ms")
# What a CPU engine measures; everything else is null.
MEASURED = {
    "actor_queue_ms",
    "actor_admission_ms",
    "tokenization_ms",
    "prefill_ms",
    "decode_ms",
    "sampling_ms",
    "adapter_ms",
    "response_delivery_ms",
    "handler_queue_ms",
    "unexplained_ms",
}


def numbers(value: object, where: str = "$") -> list[tuple[str, float]]:
    """Every number of a JSON value, with its place."""
    if isinstance(value, dict):
        return [pair for key, item in value.items() for pair in numbers(item, f"{where}.{key}")]
    if isinstance(value, list):
        return [pair for item in value for pair in numbers(item, where)]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [(where, value)]
    return []


def check_performance(performance: Body, *, streamed: bool) -> None:
    for where, number in numbers(performance):
        assert math.isfinite(number) and number >= 0, where
    latency, tokens = performance["latency"], performance["completion_tokens"]
    assert latency["emitted_tokens"] == tokens
    assert latency["gap_samples"] == max(0, tokens - 1)
    assert latency["retained_gap_samples"] <= 8192
    assert latency["gap_samples_truncated"] is (latency["gap_samples"] > 8192)
    reasons = latency["stall_reasons"]
    assert latency["stall_count"] == sum(reasons.values())
    assert latency["unexplained_stall_count"] == reasons["unexplained"]
    phases = latency["phases"]
    measured = {name for name, value in phases.items() if value is not None}
    assert measured == MEASURED | ({"client_delivery_ms"} if streamed else set())
    assert latency["ttft_ms"] == performance["ttft_ms"] <= performance["total_latency_ms"]
    for name in ("actor_queue_ms", "actor_admission_ms", "prefill_ms", "decode_ms"):
        assert phases[name] == performance[name]
        assert performance[name] <= performance["total_latency_ms"]
    assert performance["actor_prefill_wall_ms"] >= performance["prefill_ms"] * 0.99
    if tokens > 1:
        order = ["itl_ms_p50", "itl_ms_p99", "itl_ms_p999", "max_itl_ms"]
        values = [latency[name] for name in order]
        assert values == sorted(values)
        expected = max(250.0, 5 * latency["itl_ms_p50"])
        assert latency["stall_threshold_ms"] == pytest.approx(expected)
        assert performance["decode_tokens_per_sec"] == pytest.approx(1000 * tokens / performance["decode_ms"])
    else:
        assert latency["itl_ms_p50"] is latency["max_itl_ms"] is None


def performance_of(answer: Body) -> Body:
    found: Body = answer["metadata"]["performance"]
    return found


def timings_of(events: list[Body]) -> list[Body]:
    return [event for event in events if event["object"] == "kiln.token_timing"]


class TestMetadata:
    @pytest.mark.parametrize("tokens", [1, 2, 30])
    def test_numbers(self, api: Api, tokens: int) -> None:
        answer = api.chat("Think forever.", max_tokens=tokens, ignore_eos=True, include_performance=True)
        performance = performance_of(answer)
        check_performance(performance, streamed=False)
        assert performance["prompt_tokens"] == answer["usage"]["prompt_tokens"]
        assert performance["completion_tokens"] == answer["usage"]["completion_tokens"] == tokens
        assert performance["finish_reason"] == answer["choices"][0]["finish_reason"] == "length"
        assert performance["thinking_mode"] == answer["metadata"]["thinking_mode"]
        assert performance["adapter_used"] == "base"
        assert performance["resident_prefill_used"] is None

    def test_phases_do_not_exceed_the_whole(self, api: Api) -> None:
        started = time.monotonic()
        performance = performance_of(api.chat(max_tokens=40, include_performance=True))
        elapsed = (time.monotonic() - started) * 1000
        assert performance["total_latency_ms"] <= elapsed
        phases = performance["latency"]["phases"]
        engine = sum(phases[name] for name in ("prefill_ms", "decode_ms", "sampling_ms"))
        assert 0 < engine <= performance["total_latency_ms"]

    def test_no_token(self, api: Api) -> None:
        performance = performance_of(api.chat(max_tokens=0, include_performance=True))
        assert performance["completion_tokens"] == 0
        assert performance["ttft_ms"] is None
        assert performance["decode_tokens_per_sec"] is None
        assert performance["finish_reason"] == "length"
        for where, number in numbers(performance):
            assert math.isfinite(number) and number >= 0, where

    def test_a_stop_string(self, api: Api) -> None:
        for _ in range(5):
            answer = api.chat("1+1=?", max_tokens=40, stop=" answer", include_performance=True)
            check_performance(performance_of(answer), streamed=False)
            assert performance_of(answer)["finish_reason"] == "stop"

    def test_a_token_after_the_stop_does_not_count(self, api: Api) -> None:
        """The engine may have made one more, and ended on it, before it heard of the stop."""
        count = api.chat("1+1=?", max_tokens=40, stop=" answer")["usage"]["completion_tokens"]
        for _ in range(5):
            answer = api.chat("1+1=?", max_tokens=count + 1, stop=" answer", include_performance=True)
            assert answer["usage"]["completion_tokens"] == count
            check_performance(performance_of(answer), streamed=False)
            events = api.stream("1+1=?", max_tokens=count + 1, stop=" answer", include_performance=True)
            check_timings(api, events)

    def test_it_is_of_the_first_choice(self, api: Api) -> None:
        answer = api.chat(n=4, max_tokens=10, temperature=1, ignore_eos=True, include_performance=True)
        assert performance_of(answer)["completion_tokens"] == 10
        assert answer["usage"]["completion_tokens"] == 40
        check_performance(performance_of(answer), streamed=False)

    def test_without_thinking(self, api: Api) -> None:
        kwargs = {"enable_thinking": False}
        answer = api.chat(max_tokens=5, include_performance=True, chat_template_kwargs=kwargs)
        assert performance_of(answer)["thinking_mode"] == "non_reasoning"

    def test_beside_provenance(self, api: Api) -> None:
        answer = api.chat(max_tokens=20, include_performance=True, rollout_provenance=True)
        check_performance(performance_of(answer), streamed=False)

    def test_under_load(self, api: Api) -> None:
        with Load(api, 12), ThreadPoolExecutor(8) as pool:
            ask = lambda i: api.chat(f"{i}+{i}=?", max_tokens=20, include_performance=True)  # noqa: E731
            for answer in pool.map(ask, range(16)):
                check_performance(performance_of(answer), streamed=False)

    def test_waiting_for_a_place_is_seen(self) -> None:
        with model_api(engine__parallel=1) as narrow, ThreadPoolExecutor(4) as pool:
            ask = lambda i: narrow.chat(  # noqa: E731
                f"{i}", max_tokens=60, ignore_eos=True, include_performance=True
            )
            found = [performance_of(answer) for answer in pool.map(ask, range(4))]
        waits = sorted(p["actor_queue_ms"] + p["actor_admission_ms"] for p in found)
        fastest = min(p["decode_ms"] for p in found)
        assert waits[-1] > fastest
        assert waits[0] < waits[-1]

    @pytest.mark.parametrize("wish", [None, False])
    def test_nobody_asked(self, api: Api, wish: bool | None) -> None:
        assert "performance" not in api.chat(max_tokens=2, include_performance=wish)["metadata"]
        events = api.stream(max_tokens=2, include_performance=bool(wish))
        assert not timings_of(events)

    def test_the_servers_default(self) -> None:
        with model_api(server__include_performance=True) as telling:
            assert "performance" in telling.chat(max_tokens=2)["metadata"]
            assert "performance" in telling.chat(max_tokens=2, include_performance=None)["metadata"]
            assert "performance" not in telling.chat(max_tokens=2, include_performance=False)["metadata"]


class TestStream:
    def test_events(self, api: Api) -> None:
        events = api.stream(
            max_tokens=40, thinking_budget_tokens=9, include_performance=True, temperature=1, seed=3
        )
        check_timings(api, events)

    def test_under_load(self, api: Api) -> None:
        with Load(api, 12):
            for seed in range(4):
                check_timings(api, api.stream(max_tokens=30, include_performance=True, seed=seed))

    def test_ids_are_those_of_the_rollout(self, api: Api) -> None:
        fields: Body = {"max_tokens": 30, "thinking_budget_tokens": 5}
        timings = timings_of(api.stream(include_performance=True, **fields))
        _, record = api.rollout(**fields)
        assert [t["token_id"] for t in timings] == [a["token_id"] for a in record["action_tokens"]]

    def test_tokens_that_are_no_text_have_one_too(self, scripted_api: Api, stage: Stage) -> None:
        stage.say(stage.bytes("é"), "</think>", stage.bytes("漢字"))
        events = scripted_api.stream(max_tokens=60, include_performance=True)
        ids = [t["token_id"] for t in timings_of(events)]
        assert ids == [*stage.script, stage.end]
        deltas = [choice["delta"] for event in events for choice in event.get("choices", [])]
        assert [d["reasoning_content"] for d in deltas if "reasoning_content" in d] == ["é"]
        assert [d["content"] for d in deltas if "content" in d] == ["漢", "字"]

    def test_a_stop_string(self, api: Api) -> None:
        for _ in range(5):
            events = api.stream("1+1=?", max_tokens=40, stop=" answer", include_performance=True)
            check_timings(api, events)

    def test_no_token(self, api: Api) -> None:
        # The checked stream demands metadata and timings; there is no token to time here.
        response = api.server.post(stream=True, max_tokens=0, include_performance=True)
        assert response.status_code == 200
        assert b"kiln.token_timing" not in response.content
        assert b'"performance"' in response.content

    def test_a_token_is_sent_when_it_is_there(self, scripted_api: Api, stage: Stage) -> None:
        stage.repeat("word ")
        stage.pace_s = 0.05
        timings = timings_of(scripted_api.stream(max_tokens=6, include_performance=True))
        gaps = [b["ready_ms"] - a["ready_ms"] for a, b in zip(timings, timings[1:], strict=False)]
        assert min(gaps) >= 49
        # Nobody holds a token back until the next one is there.
        delays = sorted(t["body_enqueued_ms"] - t["ready_ms"] for t in timings)
        assert delays[len(delays) // 2] < 40
        for timing in timings[1:]:
            assert timing["blocking_phase"] == "actor_decode"
            assert timing["blocking_phase_ms"] >= 49


class TestStalls:
    def test_a_slow_step(self, scripted_api: Api, stage: Stage) -> None:
        def slow() -> int:
            time.sleep(0.4)
            return stage.end

        stage.say("one two three four", [slow])
        answer = scripted_api.chat(max_tokens=60, include_performance=True)
        latency = performance_of(answer)["latency"]
        assert latency["stall_reasons"]["actor_decode"] == latency["stall_count"] == 1
        assert latency["max_itl_ms"] >= 400

    def test_slow_sampling(
        self, inline_api: Api, before_pick: Callable[[Callable[[int, int], None]], None]
    ) -> None:
        inline_api.chat(max_tokens=4)

        def slow(choice: int, index: int) -> None:
            if index == 5:
                time.sleep(0.5)

        before_pick(slow)
        answer = inline_api.chat("Think forever.", max_tokens=9, include_performance=True)
        latency = performance_of(answer)["latency"]
        assert latency["phases"]["sampling_ms"] >= 500
        assert latency["stall_reasons"]["sampling"] == latency["stall_count"] == 1


def check_timings(api: Api, events: list[Body]) -> None:
    """One timing a token, in order, after the token's own text, with marks that rise."""
    timings = timings_of(events)
    (performance,) = [e["metadata"]["performance"] for e in events if "metadata" in e]
    check_performance(performance, streamed=True)
    assert [t["token_index"] for t in timings] == list(range(performance["completion_tokens"]))
    assert {t["source"] for t in timings} == {"batching_engine"}
    for timing in timings:
        marks = [timing[name] for name in MARKS]
        assert marks == sorted(marks)
        assert timing["queue_delay_ms"] == pytest.approx(
            timing["response_delivery_ms"] + timing["handler_queue_ms"]
        )
        for where, number in numbers(timing):
            assert math.isfinite(number) and number >= 0, where
        assert (timing["blocking_phase"] is None) == (timing["blocking_phase_ms"] is None)
    for name in MARKS:
        line = [timing[name] for timing in timings]
        assert line == sorted(line), name
    assert timings[0]["ready_ms"] == performance["ttft_ms"]
    check_text_before_timing(api, events)


def check_text_before_timing(api: Api, events: list[Body]) -> None:
    """Text never comes before the tokens it is made of were there, and never after the next timing."""
    made, shown = b"", ""
    pending: list[Any] = []
    for event in events:
        if event["object"] == "kiln.token_timing":
            made += api.pieces[event["token_id"]]
            # The text that came since the last timing is made of bytes up to this token.
            assert all(text.encode() in made for text in pending)
            pending = []
        for choice in event.get("choices", []):
            delta = choice["delta"]
            text = delta.get("content", delta.get("reasoning_content", ""))
            if text and "finish_reason" not in choice:
                pending.append(text)
                shown += text
    # Text that was held back to the end may follow the last timing.
    assert shown.strip() != ""
