"""Loads and workloads against a scripted server: counts, order and consistency, no tight timings."""

from __future__ import annotations

import asyncio
import json

import pytest

from kiln.core.errors import ConfigError
from kiln.loadgen.client.connection import Client
from kiln.loadgen.client.target import parse_target
from kiln.loadgen.client.trace import Trace
from kiln.loadgen.distributions import Fixed
from kiln.loadgen.load import GIVE_UP_AFTER, ClosedLoop, Poisson, Until, generate_load, run, run_load
from kiln.loadgen.prompts import BodyOptions, Prompt, PromptShape, encode_body
from kiln.loadgen.report import Limits, Report
from kiln.loadgen.server import Server, bodies_of, connect
from kiln.loadgen.session import Plan, Session
from kiln.loadgen.standing import STANDING, Scenario, compare_scenario
from kiln.loadgen.workloads import (
    budgets,
    long_prompt_among_decoders,
    many_choices,
    second_turn,
    shared_prefix,
    streams,
    time_budgets,
)

from .scripted import MODEL, Scripted, raw_server


@pytest.fixture
def server(url: str) -> Server:
    return Server(parse_target(url, model=MODEL), 2.0)


def bodies(count: int, tokens: int = 4, model: str = MODEL) -> list[bytes]:
    options = BodyOptions(model=model)
    return [encode_body(Prompt(None, f"prompt {n}", tokens), options) for n in range(count)]


def test_a_closed_loop_keeps_its_concurrency(url: str, scripted: Scripted) -> None:
    report = run_load(
        parse_target(url), bodies(9), ClosedLoop(3), Until(requests=9), limits=Limits(ttft_ms=60_000)
    )
    assert (report.requests, report.succeeded, report.errors) == (9, 9, {})
    assert len(scripted.bodies) == 9
    starts = [(t.started_s, 1) for t in report.traces]
    changes = sorted(starts + [(t.ended_s or 0, -1) for t in report.traces])
    under_way = peak = 0
    for _, change in changes:
        under_way += change
        peak = max(peak, under_way)
    assert peak == 3
    assert report.window_s is not None and 0 < report.window_s <= report.span_s
    assert report.ttft_ms is not None and report.answer_ms is not None and report.e2e_ms is not None
    for trace in report.traces:
        assert trace.ttft_s is not None and trace.answer_s is not None and trace.e2e_s is not None
        assert 0 < trace.ttft_s <= trace.answer_s <= trace.e2e_s
        assert trace.tokens == 4 and trace.prompt_tokens == 9
    assert report.goodput is not None and report.goodput.share == 1
    assert report.output_tokens_from == "usage"
    assert 0 < report.client.cpu_s < report.client.wall_s


def test_poisson_arrivals_do_not_wait_for_answers(url: str) -> None:
    report = run_load(parse_target(url), bodies(6, 20), Poisson(500.0), Until(requests=6))
    assert report.succeeded == 6
    first_end = min(trace.ended_s or 0 for trace in report.traces)
    assert sum(trace.started_s < first_end for trace in report.traces) > 1


def test_a_duration_ends_a_load_and_lets_requests_finish(url: str) -> None:
    report = run_load(parse_target(url), bodies(10_000, 2), ClosedLoop(2), Until(duration_s=0.2))
    assert 2 <= report.requests < 10_000
    assert report.succeeded == report.requests


def test_bodies_that_run_out_end_a_load(url: str) -> None:
    assert run_load(parse_target(url), bodies(3), ClosedLoop(2), Until(duration_s=60)).requests == 3


def test_a_load_needs_an_end(url: str) -> None:
    with pytest.raises(ValueError, match="end"):
        run_load(parse_target(url), bodies(3), ClosedLoop(2), Until())


def test_errors_are_counted_by_kind_and_not_measured(url: str, scripted: Scripted) -> None:
    scripted.fail_every = 3
    report = run_load(parse_target(url), bodies(9), ClosedLoop(1), Until(requests=9))
    assert report.errors == {"http_503": 3}
    assert report.error_examples == {"http_503": "too busy"}
    assert report.succeeded == len(report.samples.ttft_ms) == 6


def test_a_hopeless_load_is_given_up(url: str) -> None:
    report = run_load(parse_target(url), bodies(500, model="none"), ClosedLoop(2), Until(requests=500))
    assert report.succeeded == 0
    assert GIVE_UP_AFTER <= report.requests <= GIVE_UP_AFTER + 1


def test_a_stop_cuts_requests_off_and_keeps_those_that_ended(url: str) -> None:
    async def stopping() -> list[Trace]:
        client = Client(parse_target(url))
        stop = asyncio.Event()
        traces, _ = await generate_load(
            client,
            bodies(2, 2) + bodies(50, 10_000),
            ClosedLoop(2),
            Until(requests=50),
            stop=stop,
            on_trace=lambda _: stop.set(),
        )
        client.close()
        return traces

    traces = run(stopping())
    assert 1 <= len(traces) <= 2
    assert all(trace.ok for trace in traces)


def test_a_stop_is_heard_while_a_server_is_silent() -> None:
    async def stopping(url: str) -> list[Report]:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(0.1, stop.set)
        plan = Plan((ClosedLoop(2),), Until(requests=4))
        return await Session(plan, stop).run_one(parse_target(url, model=MODEL))

    with raw_server([30.0]) as url:
        (report,) = run(stopping(url))
    assert report.interrupted and report.requests == 0


def test_an_error_in_the_making_of_bodies_is_raised_itself(url: str) -> None:
    chat = Prompt(({"role": "user", "content": "x"},), None, 1)
    wrong = (encode_body(chat, BodyOptions("completions")) for _ in range(1))
    with pytest.raises(ConfigError, match="completions"):
        run_load(parse_target(url), wrong, ClosedLoop(1), Until(requests=1))


def test_connect_finds_the_model_and_the_length_of_a_word(url: str) -> None:
    server = connect(url)
    assert server.target.model == MODEL
    assert server.tokens_per_word == 2.0


def test_streams_are_asked_at_once_with_prompts_of_their_own(server: Server, scripted: Scripted) -> None:
    figures = streams(server, 4, output_tokens=6, prompt_tokens=20)
    assert figures.prompt_tokens == 25
    assert figures.tokens_per_s == pytest.approx(24 / figures.all_done_s)
    asked = [body["messages"][0]["content"] for body in scripted.bodies]
    assert len(set(asked)) == 4
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in scripted.bodies)
    streams(server, 4, output_tokens=6, prompt_tokens=20)
    again = [body["messages"][0]["content"] for body in scripted.bodies[4:]]
    assert sorted(again) == sorted(asked)
    streams(server, 4, output_tokens=6, prompt_tokens=20, seed=1)
    assert not set(asked) & {body["messages"][0]["content"] for body in scripted.bodies[8:]}


def test_the_shared_prefix_is_shared(server: Server, scripted: Scripted) -> None:
    shared_prefix(server, requests=2)
    one, two = (body["messages"][0]["content"].split() for body in scripted.bodies)
    assert len(one) == (1024 + 32) / 2
    assert one[:512] == two[:512] and one[512:] != two[512:]


def test_the_second_turn_continues_the_first(server: Server, scripted: Scripted) -> None:
    figures = second_turn(server, chat_tokens=40)
    first, second = (body["messages"] for body in scripted.bodies)
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second[0] == first[0] and second[1]["content"] == "fine"
    assert figures.second_ttft_ms > 0 and figures.first_turn_s > 0


def test_a_long_prompt_arrives_while_decoders_run(server: Server, scripted: Scripted) -> None:
    figures = long_prompt_among_decoders(
        server, decoders=2, prompt_tokens=200, decoder_tokens=5_000, settle_tokens=4
    )
    assert figures.decoders_lasted
    assert figures.itl_ms_max >= figures.itl_ms_p99 >= 0 and figures.itl_ms_max > 0
    assert figures.quiet_itl_ms_p99 >= 0
    words = [len(body["messages"][0]["content"].split()) for body in scripted.bodies]
    assert words == [16, 16, 100]


def test_choices_are_compared_with_requests_of_new_prompts(server: Server, scripted: Scripted) -> None:
    figures = many_choices(server, n=3, prompt_tokens=10, output_tokens=2)
    assert figures.ratio == pytest.approx(figures.together_s / figures.separate_s)
    assert [body.get("n") for body in scripted.bodies] == [3, None, None, None]
    assert len({json.dumps(body["messages"]) for body in scripted.bodies}) == 4


def test_budgets_are_off_distant_and_binding(server: Server, scripted: Scripted) -> None:
    figures = budgets(server, concurrency=2, output_tokens=4, binding=2, seed=1)
    limits = [body["thinking_budget_tokens"] for body in scripted.bodies]
    assert limits == [1_000_000] * 2 + [None] * 2 + [2] * 2
    assert figures.binding.budget_triggered == 2
    assert figures.binding.overshoot_tokens_max == 0
    time_budgets(server, concurrency=1, budget_ms=50, output_tokens=4)
    assert scripted.bodies[-1]["thinking_budget_ms"] == 50


def test_a_failed_request_ends_a_scenario_in_plain_words(url: str) -> None:
    lost = Server(parse_target(url, model="none"))
    for scenario in (lambda: streams(lost, 2), lambda: second_turn(lost), lambda: many_choices(lost, n=2)):
        with pytest.raises(ConfigError, match="no such model"):
            scenario()


def test_two_servers_are_compared_by_a_scenarios_figure(server: Server) -> None:
    quick = Scenario("quick", lambda s, seed: streams(s, 1, seed=seed, output_tokens=4), "tokens_per_s", True)
    ratio, a, b = compare_scenario(quick, server, server, 2)
    assert ratio.count == 2 and ratio.low > 0 and a > 0 and b > 0
    nothing = Scenario("none", quick.run, "overshoot_ms_max", False)
    with pytest.raises(ConfigError, match="overshoot_ms_max"):
        compare_scenario(nothing, server, server, 1)


def test_standing_workloads_have_names_of_their_own() -> None:
    names = [scenario.name for scenario in STANDING]
    assert len(set(names)) == len(names)
    assert {"16 streams, sampled", "shared 1k prefix", "second turn", "8 choices"} <= set(names)


def test_bodies_for_other_loads_fit_the_server(server: Server) -> None:
    made = bodies_of(server, PromptShape(Fixed(10), Fixed(3)), 2, seed=5)
    assert len(set(made)) == 2
    assert len(json.loads(made[0])["messages"][0]["content"].split()) == 5
