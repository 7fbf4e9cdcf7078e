"""The completion cache seen from outside: an answer from memory is the answer, in every shape."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from servers.raw import posted
from servers.server import metric, wait_until

from .api import CHAT, PROMPT, UNTRUNCATED, Api, Body, model_api, texts

LOUD: Body = {**UNTRUNCATED, "temperature": 1.5, "seed": 3, "max_tokens": 30}


@pytest.fixture(scope="module")
def cached() -> Iterator[Api]:
    """A server that remembers 64 generations."""
    with model_api(engine__completion_cache=64) as running:
        yield running


def results(api: Api) -> dict[str, float]:
    """Generations by what the cache did with them."""
    text = api.server.client.get("/metrics").text
    name = "kiln_completion_cache_total"
    return {r: metric(text, name, result=r) for r in ("hit", "joined", "miss", "bypass")}


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


def settled(answer: Body) -> Body:
    """A response without what differs every time."""
    return {key: value for key, value in answer.items() if key not in ("id", "created")}


class TestAnswers:
    @pytest.mark.parametrize(
        "fields",
        [
            {"max_tokens": 30},
            LOUD,
            {**LOUD, "thinking_budget_tokens": 5},
            {**LOUD, "n": 3},
            {"max_tokens": 8, "include_config_hashes": True, "fold_reasoning_into_content": True},
        ],
    )
    def test_the_second_is_the_first(self, api: Api, cached: Api, fields: Body) -> None:
        first, second = cached.chat(**fields), cached.chat(**fields)
        assert settled(first) == settled(second)
        assert first["id"] != second["id"]
        # What is computed anew elsewhere is the same too, but for the time that it took.
        assert texts(api.chat(**fields)) == texts(first)

    def test_stop_strings_pass_by(self, cached: Api) -> None:
        fields: Body = {**LOUD, "thinking_budget_tokens": 5, "stop": ["."]}
        before = results(cached)
        first, second = cached.chat(**fields), cached.chat(**fields)
        assert grown(before, results(cached)) == {"bypass": 2}
        assert texts(first) == texts(second)
        assert first["choices"][0]["thinking_budget"]["closed"] is True

    def test_a_stream_of_it(self, cached: Api) -> None:
        content = "7-3=?"
        plain = cached.chat(content, **LOUD)["choices"][0]["message"]
        before = results(cached)
        events = cached.stream(content, **LOUD)
        assert grown(before, results(cached)) == {"hit": 1}
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        assert "".join(d.get("content", "") for d in deltas) == plain["content"]
        assert "".join(d.get("reasoning_content", "") for d in deltas) == plain["reasoning_content"]

    def test_a_batch_of_it(self, cached: Api) -> None:
        chats = [text for c in ("2+5=?", "2+6=?") for text in texts(cached.chat(c, n=2, **LOUD))]
        before = results(cached)
        assert texts(cached.batch("2+5=?", "2+6=?", n=2, **LOUD)) == chats
        assert grown(before, results(cached)) == {"hit": 4}

    def test_identical_ones_at_once_are_computed_once(self, cached: Api) -> None:
        before, steps = results(cached), cached.stats.prompt_tokens_computed
        fields: Body = {**LOUD, "max_tokens": 200, "ignore_eos": True}
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: texts(cached.chat("4+4=?", **fields)), range(8)))
        assert found == [found[0]] * 8
        counted = grown(before, results(cached))
        assert counted["miss"] == 1
        assert sum(counted.values()) == 8
        assert cached.stats.prompt_tokens_computed - steps < 40

    def test_one_that_leaves_does_not_take_the_others_along(self, cached: Api) -> None:
        fields: Body = {**LOUD, "max_tokens": 600, "ignore_eos": True, "seed": 77}
        body: Body = {"messages": [{"role": "user", "content": PROMPT}], **fields}
        with ThreadPoolExecutor(2) as pool:
            with posted(cached.server.url, CHAT, body):
                wait_until(lambda: cached.stats.running == 1, "the first runs")
                others = [pool.submit(cached.chat, PROMPT, **fields) for _ in range(2)]
                wait_until(lambda: len(cached.service._exchanges) == 3, "all are there")
            answers = [texts(other.result(60)) for other in others]
        assert answers[0] == answers[1]
        assert cached.chat(**fields)["usage"]["completion_tokens"] == 600


class TestKeys:
    @pytest.mark.parametrize(
        "change",
        [
            {"seed": 4},
            {"temperature": 1.4},
            {"top_k": 30},
            {"max_tokens": 29},
            {"thinking_budget_tokens": 6},
            {"thinking_budget_tokens": 1000},
            {"ignore_eos": True},
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"presence_penalty": 1},
        ],
    )
    def test_what_decides_tokens_is_in_the_key(self, cached: Api, change: Body) -> None:
        fields: Body = {**LOUD, "thinking_budget_tokens": 5}
        cached.chat(**fields)
        before = results(cached)
        cached.chat(**{**fields, **change})
        assert "hit" not in grown(before, results(cached))

    @pytest.mark.parametrize(
        "change", [{"include_config_hashes": True}, {"fold_reasoning_into_content": True}, {"stop": []}]
    )
    def test_what_does_not_is_not(self, cached: Api, change: Body) -> None:
        cached.chat(**LOUD)
        before = results(cached)
        cached.chat(**LOUD, **change)
        assert grown(before, results(cached)) == {"hit": 1}

    @pytest.mark.parametrize(
        "fields",
        [
            {"rollout_provenance": True},
            {"include_performance": True},
            {"thinking_budget_ms": 60_000},
            {"seed": None, "temperature": 1},
            # A stop string cuts a generation that others may want whole.
            {"stop": ["."]},
            {"stop": ["."], "thinking_budget_tokens": 5},
        ],
    )
    def test_what_passes_it_by(self, cached: Api, fields: Body) -> None:
        cached.chat(**LOUD)
        for _ in range(2):
            before = results(cached)
            answer = cached.chat(**{**LOUD, **fields})
            assert grown(before, results(cached)) == {"bypass": 1}
            assert answer["usage"]["completion_tokens"] > 0

    def test_scores_pass_it_by(self, cached: Api) -> None:
        before = results(cached)
        assert cached.score([5, 6, 7], 2) and cached.score([5, 6, 7], 2)
        assert grown(before, results(cached)) in ({}, {"bypass": 2})

    def test_an_inert_time_budget_does_not(self, cached: Api) -> None:
        fields: Body = {
            **LOUD,
            "thinking_budget_ms": 5,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        cached.chat(**fields)
        before = results(cached)
        cached.chat(**fields)
        assert grown(before, results(cached)) == {"hit": 1}

    def test_the_cache_is_bounded(self, cached: Api) -> None:
        for seed in range(70):
            cached.chat("1+1=?", **{**LOUD, "seed": seed, "max_tokens": 2})
        engine: Any = cached.service.engine
        assert len(engine._finished) <= 64
