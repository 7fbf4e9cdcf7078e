"""Thinking budgets over HTTP, on the real model and on a scripted one."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from kiln.cli.assembly import describe_model, load_model
from kiln.core.settings import Settings
from servers import traffic
from servers.scripted import Stage
from servers.server import FIXTURES, Server, Streamed, chat_body, serving_model, settings_of

BUDGETS = [0, 1, 8, 16, 32, 64, None]
PROBLEMS = 200
AT_ONCE = 16
# Enough for every budget, its close and an answer.
ROOM = 256

Body = dict[str, Any]


async def gather(url: str, bodies: list[Body], at_once: int = AT_ONCE) -> list[Body]:
    """The answers to many requests, in order."""
    gate = asyncio.Semaphore(at_once)
    async with traffic.async_client(url) as client:

        async def one(body: Body) -> Body:
            async with gate:
                response = await client.post(traffic.CHAT, json=body)
            assert response.status_code == 200, response.text
            answer: Body = response.json()
            return answer

        return await asyncio.gather(*(one(body) for body in bodies))


def check(answer: Body, budget: int | None, close_tokens: int = 1) -> None:
    """What every completion must keep, whatever was sampled."""
    (choice,) = answer["choices"]
    message, record, usage = choice["message"], answer["metadata"]["thinking_budget"], answer["usage"]
    reasoning = message.get("reasoning_content", "")
    if budget is None:
        assert record["tokens_source"] == "request_unlimited"
        assert record["configured"] is record["applied"] is record["triggered"] is False
        assert "thinking_tokens" not in record
    else:
        assert record["tokens_source"] == "request"
        assert record["max_tokens"] == budget
        assert record["configured"] is record["applied"] is True
        assert record["closed"] is True
        assert record["thinking_tokens"] <= budget
        assert record.get("trigger") in ((None, "tokens") if budget else ("tokens",))
        if record["triggered"]:
            assert record["thinking_tokens"] == budget
        assert usage["completion_tokens"] > record["thinking_tokens"] + close_tokens
        assert (reasoning == "") <= (record["thinking_tokens"] < 2)
    assert usage["completion_tokens"] <= ROOM
    if choice["finish_reason"] == "stop":
        assert message["content"].strip(), "an answer follows"
    else:
        assert choice["finish_reason"] == "length"
        assert usage["completion_tokens"] == ROOM
    for text in (reasoning, message["content"]):
        assert "\ufffd" not in text
    assert "</think>" not in reasoning
    assert not message["content"].startswith("\n")


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("temperature", [0, 1])
async def test_held_out_problems(
    server: Server, held_out: list[Body], temperature: int, budget: int | None
) -> None:
    problems = held_out[:PROBLEMS]
    assert len(problems) == PROBLEMS
    bodies = [
        chat_body(
            problem["prompt"],
            temperature=temperature,
            seed=seed,
            thinking_budget_tokens=budget,
            max_tokens=ROOM,
        )
        for seed, problem in enumerate(problems)
    ]
    before = server.outcomes()
    answers = await gather(server.url, bodies)
    after = server.outcomes()
    for answer in answers:
        check(answer, budget)
    grown = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    expected = {"unconfigured"} if budget is None else {"tokens", "natural_close"}
    assert set(grown) <= expected
    assert sum(grown.values()) == PROBLEMS


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("temperature", [0, 1])
def test_streams_agree_with_whole_answers(
    server: Server, held_out: list[Body], temperature: int, budget: int | None
) -> None:
    # One at a time: alone and in company the model's numbers may differ in the last bits.
    for seed, problem in enumerate(held_out[-6:]):
        fields = {
            "temperature": temperature,
            "seed": seed,
            "thinking_budget_tokens": budget,
            "max_tokens": ROOM,
        }
        whole = server.ask(problem["prompt"], **fields)
        streamed = server.stream(problem["prompt"], **fields)
        agree(streamed, whole)
        if budget is not None:
            # A token brings one delta at most, and a part of the text may need several.
            assert len(streamed.texts("reasoning_content")) <= budget


def agree(streamed: Streamed, whole: Body) -> None:
    (choice,) = whole["choices"]
    assert streamed.content == choice["message"]["content"]
    assert streamed.reasoning == choice["message"].get("reasoning_content", "")
    assert streamed.finish_reason == choice["finish_reason"]
    assert streamed.usage == whole["usage"]
    records = [dict(r) for r in (streamed.record, whole["metadata"]["thinking_budget"])]
    for record in records:
        record.pop("thinking_time_ms", None)
    assert records[0] == records[1]


def test_more_thinking_helps(held_out: list[Body], server: Server) -> None:
    def share(budget: int) -> float:
        bodies = [chat_body(p["prompt"], thinking_budget_tokens=budget) for p in held_out[:80]]
        answers = asyncio.run(gather(server.url, bodies))
        right = [
            str(p["answer"]) in a["choices"][0]["message"]["content"]
            for p, a in zip(held_out, answers, strict=False)
        ]
        return sum(right) / len(right)

    assert share(96) > share(0) + 0.3


class TestExactNumbers:
    """A scripted model: ten thoughts of one token, the close, three tokens of answer, the end."""

    THOUGHTS = 10

    @pytest.fixture(autouse=True)
    def script(self, stage: Stage) -> None:
        stage.say("1" * self.THOUGHTS, "</think>", "222")

    @pytest.mark.parametrize("budget", range(12))
    def test_tokens(self, scripted_server: Server, budget: int) -> None:
        body = scripted_server.ask(thinking_budget_tokens=budget)
        record = body["metadata"]["thinking_budget"]
        message = body["choices"][0]["message"]
        natural = budget >= self.THOUGHTS
        assert record["triggered"] is not natural
        assert record.get("trigger") == (None if natural else "tokens")
        assert record["closed"] is True
        assert record["thinking_tokens"] == min(budget, self.THOUGHTS)
        assert message.get("reasoning_content", "") == "1" * min(budget, self.THOUGHTS)
        # What was sampled in place of the forced token is lost; the thoughts after it are the answer.
        rest = "" if natural else "1" * (self.THOUGHTS - budget - 1)
        assert message["content"].replace("</think>", "") == rest + "222"
        assert body["usage"]["completion_tokens"] == self.THOUGHTS + 1 + 3 + 1

    @pytest.mark.parametrize("budget", [0, 3, 10, 50])
    def test_streams_agree(self, scripted_server: Server, budget: int) -> None:
        streamed = scripted_server.stream(thinking_budget_tokens=budget)
        agree(streamed, scripted_server.ask(thinking_budget_tokens=budget))
        assert streamed.texts("reasoning_content") == ["1"] * min(budget, self.THOUGHTS)

    @pytest.mark.parametrize("limit", range(1, 16))
    @pytest.mark.parametrize("budget", [4, 1000])
    def test_the_completion_limit(self, scripted_server: Server, limit: int, budget: int) -> None:
        body = scripted_server.ask(thinking_budget_tokens=budget, max_tokens=limit)
        record = body["metadata"]["thinking_budget"]
        assert record["closed"] is True
        assert body["usage"]["completion_tokens"] == min(limit, self.THOUGHTS + 5)
        reserved = limit - 1
        assert record["thinking_tokens"] == min(budget, reserved, self.THOUGHTS)
        natural = min(budget, reserved) >= self.THOUGHTS
        trigger = "tokens" if budget <= reserved else "max_tokens"
        assert record.get("trigger") == (None if natural else trigger)

    def test_unlimited_is_cut_like_anything(self, scripted_server: Server) -> None:
        body = scripted_server.ask(thinking_budget_tokens=None, max_tokens=4)
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["choices"][0]["message"] == {
            "role": "assistant",
            "content": "",
            "reasoning_content": "1111",
        }
        assert body["metadata"]["content_empty_reason"] == "reasoning_without_final_content"

    def test_ended_unclosed(self, scripted_server: Server, stage: Stage) -> None:
        stage.say("11")
        before = scripted_server.outcomes()["unclosed"]
        record = scripted_server.ask(thinking_budget_tokens=50)["metadata"]["thinking_budget"]
        assert (record["triggered"], record["closed"]) == (False, False)
        # The end of the turn was generated inside the block too.
        assert record["thinking_tokens"] == 3
        assert "trigger" not in record
        assert scripted_server.outcomes()["unclosed"] == before + 1

    def test_each_choice_has_an_outcome(self, scripted_server: Server) -> None:
        before = scripted_server.outcomes()["tokens"]
        body = scripted_server.ask(thinking_budget_tokens=3, n=4)
        outcomes = [choice["thinking_budget"] for choice in body["choices"]]
        assert [outcome["thinking_tokens"] for outcome in outcomes] == [3] * 4
        assert body["usage"]["completion_tokens"] == 4 * 15
        assert scripted_server.outcomes()["tokens"] == before + 4


class TestTime:
    def test_nothing_left(self, server: Server) -> None:
        record = server.ask(thinking_budget_ms=0)["metadata"]["thinking_budget"]
        assert record == {
            "configured": True,
            "applied": True,
            "max_time_ms": 0,
            "tokens_source": "unlimited",
            "time_source": "request",
            "triggered": True,
            "trigger": "time",
            "closed": True,
            "thinking_tokens": 0,
            "thinking_time_ms": 0,
        }

    def test_twenty_milliseconds(self, scripted_server: Server, stage: Stage) -> None:
        stage.repeat("1")
        stage.pace_s = 0.004
        body = scripted_server.ask(thinking_budget_ms=20, max_tokens=30)
        record = body["metadata"]["thinking_budget"]
        assert record["trigger"] == "time"
        assert record["closed"] is True
        assert record["thinking_time_ms"] >= 20
        assert 1 <= record["thinking_tokens"] <= 5
        assert body["usage"]["completion_tokens"] == 30
        assert len(body["choices"][0]["message"]["reasoning_content"]) == record["thinking_tokens"]

    def test_the_clock_starts_with_the_first_candidate(self, scripted_server: Server, stage: Stage) -> None:
        # A slow prompt is not thinking.
        stage.say("11", "</think>", "2")
        first = stage.script[0]
        assert isinstance(first, int)

        def slowly(token: int = first) -> int:
            time.sleep(1.2)
            return token

        stage.script[0] = slowly
        record = scripted_server.ask(thinking_budget_ms=1000)["metadata"]["thinking_budget"]
        assert record["triggered"] is False
        assert record["closed"] is True
        assert record["thinking_tokens"] == 2
        assert record["thinking_time_ms"] < 1000

    def test_on_the_model(self, server: Server) -> None:
        for fields in ({}, {"temperature": 1, "seed": 4}):
            body = server.ask("Think forever.", thinking_budget_ms=20, max_tokens=ROOM, **fields)
            record = body["metadata"]["thinking_budget"]
            assert record["closed"] is True
            if record["triggered"]:
                assert record["trigger"] in ("time", "max_tokens")
            if record.get("trigger") == "time":
                assert record["thinking_time_ms"] >= 20

    def test_tokens_win_a_tie(self, server: Server) -> None:
        record = server.ask(thinking_budget_ms=0, thinking_budget_tokens=0)["metadata"]["thinking_budget"]
        assert record["trigger"] == "tokens"

    def test_the_first_limit_wins(self, scripted_server: Server, stage: Stage) -> None:
        stage.repeat("1")
        fields = {"thinking_budget_ms": 600_000, "thinking_budget_tokens": 3, "max_tokens": 9}
        record = scripted_server.ask(**fields)["metadata"]["thinking_budget"]
        assert (record["trigger"], record["thinking_tokens"]) == ("tokens", 3)
        fields = {"thinking_budget_ms": 0, "thinking_budget_tokens": 3, "max_tokens": 9}
        record = scripted_server.ask(**fields)["metadata"]["thinking_budget"]
        assert (record["trigger"], record["thinking_tokens"]) == ("time", 0)
        fields = {"thinking_budget_ms": 600_000, "thinking_budget_tokens": 100, "max_tokens": 9}
        record = scripted_server.ask(**fields)["metadata"]["thinking_budget"]
        assert (record["trigger"], record["thinking_tokens"]) == ("max_tokens", 8)


def test_a_budget_larger_than_the_completion(server: Server) -> None:
    body = server.ask("Think forever.", thinking_budget_tokens=1000, max_tokens=24)
    record = body["metadata"]["thinking_budget"]
    assert record["trigger"] == "max_tokens"
    assert record["closed"] is True
    assert record["thinking_tokens"] == 23
    assert body["usage"]["completion_tokens"] == 24
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["message"]["content"] == ""


def test_a_budget_larger_than_the_context(small_server: Server) -> None:
    body = small_server.ask("Think forever.", thinking_budget_tokens=4000)
    record, usage = body["metadata"]["thinking_budget"], body["usage"]
    assert record["closed"] is True
    assert usage["total_tokens"] <= 128
    if record["triggered"]:
        assert record["trigger"] == "max_tokens"
        assert usage["total_tokens"] == 128


TAG = "</think>"


@pytest.mark.parametrize(
    "stop", [TAG, "</", "think", ">", "k>x", "x<", "\n</th", f"a{TAG}b", ["fine", "ink"], TAG * 2]
)
def test_a_stop_string_that_overlaps_the_close(server: Server, stop: Any) -> None:
    limits: list[Body] = [{"thinking_budget_tokens": 4}, {"thinking_budget_ms": 1000}]
    for fields in limits:
        for stream in (False, True):
            error = server.refuse(stop=stop, stream=stream, **fields)
            assert error["param"] == "stop"
            assert error["code"] == "stop_overlaps_thinking_close"
    # Without an applied budget the same strings are fine.
    server.ask(stop=stop)
    server.ask(stop=stop, thinking_budget_tokens=None)
    server.ask(stop=stop, thinking_budget_tokens=4, chat_template_kwargs={"enable_thinking": False})


@pytest.mark.parametrize("stop", ["nswer", "thin", "<", "/t", "k"])
def test_a_stop_string_beside_the_close(server: Server, stop: str) -> None:
    overlaps = stop in TAG
    response = server.post(stop=stop, thinking_budget_tokens=4)
    assert response.status_code == (400 if overlaps else 200)


class TestInherited:
    def test_defaults(self, budgeting_server: Server) -> None:
        record = budgeting_server.ask()["metadata"]["thinking_budget"]
        stated = {
            "configured": True,
            "applied": True,
            "max_tokens": 8,
            "max_time_ms": 60_000,
            "tokens_source": "server_default",
            "time_source": "server_default",
        }
        assert stated.items() <= record.items()
        assert record["thinking_tokens"] <= 8
        assert record["closed"] is True

    def test_the_request_decides_each_alone(self, budgeting_server: Server) -> None:
        record = budgeting_server.ask(thinking_budget_tokens=2)["metadata"]["thinking_budget"]
        assert (record["max_tokens"], record["tokens_source"]) == (2, "request")
        assert (record["max_time_ms"], record["time_source"]) == (60_000, "server_default")
        record = budgeting_server.ask(thinking_budget_ms=0)["metadata"]["thinking_budget"]
        assert (record["max_tokens"], record["tokens_source"]) == (8, "server_default")
        assert (record["max_time_ms"], record["time_source"]) == (0, "request")
        assert record["trigger"] == "time"

    def test_null_lifts_a_default(self, budgeting_server: Server) -> None:
        record = budgeting_server.ask(thinking_budget_tokens=None)["metadata"]["thinking_budget"]
        assert "max_tokens" not in record
        assert record["tokens_source"] == "request_unlimited"
        assert (record["max_time_ms"], record["configured"]) == (60_000, True)
        both = {"thinking_budget_tokens": None, "thinking_budget_ms": None}
        record = budgeting_server.ask(**both)["metadata"]["thinking_budget"]
        assert record == {
            "configured": False,
            "applied": False,
            "tokens_source": "request_unlimited",
            "time_source": "request_unlimited",
            "triggered": False,
        }

    def test_streams_too(self, budgeting_server: Server) -> None:
        assert budgeting_server.stream().record["tokens_source"] == "server_default"
        streamed = budgeting_server.stream(thinking_budget_tokens=None, thinking_budget_ms=None)
        assert streamed.record["configured"] is False


class TestInert:
    INERT = {
        "configured": True,
        "applied": False,
        "max_tokens": 4,
        "tokens_source": "request",
        "time_source": "unlimited",
        "triggered": False,
    }

    @pytest.mark.parametrize(
        "fields",
        [
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"max_tokens": 0},
            {"max_completion_tokens": 0},
            {"max_tokens": 0, "max_completion_tokens": 5},
        ],
    )
    def test_a_budget_that_cannot_apply(self, server: Server, fields: Body) -> None:
        before = server.outcomes()["inert"]
        body = server.ask(thinking_budget_tokens=4, **fields)
        assert body["metadata"]["thinking_budget"] == self.INERT
        assert "thinking_budget" not in body["choices"][0]
        streamed = server.stream(thinking_budget_tokens=4, **fields)
        agree(streamed, body)
        assert server.outcomes()["inert"] == before + 2

    def test_no_completion_token(self, server: Server) -> None:
        body = server.ask(max_tokens=0, n=3)
        assert [c["finish_reason"] for c in body["choices"]] == ["length"] * 3
        assert body["usage"]["completion_tokens"] == 0
        assert body["metadata"]["content_empty_reason"] == "no_content"

    def test_where_thinking_is_off_by_default(self, quiet_server: Server) -> None:
        body = quiet_server.ask(thinking_budget_tokens=4)
        assert body["metadata"]["thinking_budget"] == self.INERT


@pytest.fixture(scope="module")
def close_tokens(multi_close_server: Server) -> int:
    resolved = multi_close_server.client.get("/v1/config").json()["resolved"]
    count = len(resolved["thinking"]["close_token_ids"])
    assert count > 1
    return count


class TestMultiClose:
    """The close tag is several ordinary tokens."""

    @pytest.mark.parametrize("budget", BUDGETS)
    @pytest.mark.parametrize("temperature", [0, 1])
    async def test_problems(
        self,
        multi_close_server: Server,
        held_out: list[Body],
        close_tokens: int,
        temperature: int,
        budget: int | None,
    ) -> None:
        bodies = [
            chat_body(
                problem["prompt"],
                temperature=temperature,
                seed=seed,
                thinking_budget_tokens=budget,
                max_tokens=ROOM,
            )
            for seed, problem in enumerate(held_out[:40])
        ]
        for answer in await gather(multi_close_server.url, bodies):
            check(answer, budget, close_tokens)

    @pytest.mark.parametrize("limit", [3, 4, 5, 9])
    def test_the_completion_limit(self, multi_close_server: Server, close_tokens: int, limit: int) -> None:
        body = multi_close_server.ask("Think forever.", thinking_budget_tokens=500, max_tokens=limit)
        record = body["metadata"]["thinking_budget"]
        assert record["closed"] is True
        assert record["trigger"] == "max_tokens"
        assert record["thinking_tokens"] == limit - close_tokens
        assert body["usage"]["completion_tokens"] == limit

    def test_a_close_that_cannot_fit(self, multi_close_server: Server, close_tokens: int) -> None:
        for limit in range(1, close_tokens):
            error = multi_close_server.refuse(thinking_budget_tokens=4, max_tokens=limit)
            assert error["code"] == "thinking_close_cannot_fit"
            assert error["param"] == "max_tokens"
            error = multi_close_server.refuse(thinking_budget_ms=4, max_completion_tokens=limit, stream=True)
            assert error["code"] == "thinking_close_cannot_fit"
            assert error["param"] == "max_completion_tokens"
            multi_close_server.ask(max_tokens=limit)
            multi_close_server.ask(
                max_tokens=limit, thinking_budget_tokens=4, chat_template_kwargs={"enable_thinking": False}
            )

    def test_a_context_without_room_for_the_close(self, close_tokens: int) -> None:
        path = str(FIXTURES / "multi-close.gguf")
        with serving_model(model__path=path, engine__ctx_size=64) as server:
            used = server.ask("1", max_tokens=1)["usage"]["prompt_tokens"]
            digits = 64 - used + 1
            body = server.ask("1" * (digits - close_tokens), thinking_budget_tokens=9)
            assert body["usage"] == {
                "prompt_tokens": 64 - close_tokens,
                "completion_tokens": close_tokens,
                "total_tokens": 64,
            }
            assert body["metadata"]["thinking_budget"]["closed"] is True
            error = server.refuse("1" * (digits - close_tokens + 1), thinking_budget_tokens=9)
            assert error["code"] == "thinking_close_cannot_fit"
            assert error["param"] == "messages"


async def test_many_kinds_at_once(server: Server, held_out: list[Body]) -> None:
    """Requests of all kinds in one batch keep their own budgets."""
    rng = random.Random(7)
    bodies, budgets = [], []
    for problem in rng.sample(held_out, 64):
        budget = rng.choice(BUDGETS)
        budgets.append(budget)
        bodies.append(
            chat_body(
                problem["prompt"],
                temperature=rng.choice([0, 0.7, 1]),
                seed=rng.randrange(2**64),
                thinking_budget_tokens=budget,
                max_tokens=ROOM,
            )
        )
    for answer, budget in zip(await gather(server.url, bodies, at_once=64), budgets, strict=True):
        check(answer, budget)


def test_the_fixture_really_needs_several_tokens() -> None:
    settings = settings_of(model__path=str(FIXTURES / "multi-close.gguf"))
    llama = load_model(settings)
    try:
        close = describe_model(settings, llama).close
        assert close is not None
        assert len(close.ids) > 1
        assert b"".join(llama.pieces[i] for i in close.ids) == TAG.encode()
    finally:
        llama.close()
    plain = load_model(Settings())
    try:
        close = describe_model(Settings(), plain).close
        assert close is not None
        assert len(close.ids) == 1
    finally:
        plain.close()
