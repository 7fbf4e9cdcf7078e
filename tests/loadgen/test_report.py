"""Figures of synthetic traces, exactly; tables, plots and ratios made of them."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kiln.core.errors import ConfigError
from kiln.loadgen import chart
from kiln.loadgen.chart import Axis, Series, cdf_points, choose_axis, draw_svg, save_plot, series_of
from kiln.loadgen.client.trace import Failure, Trace
from kiln.loadgen.compare import Comparison, compare_figures, turns
from kiln.loadgen.load import ClosedLoop, Poisson, full_window
from kiln.loadgen.report import ClientCost, Limits, Report, build_report
from kiln.loadgen.tables import number, show_comparison, show_report

from .scripted import trace_of

COST = ClientCost(cpu_s=0.1, wall_s=2.0, chunks=6)


def failed(kind: str = "timeout", **fields: Any) -> Trace:
    return trace_of([], failure=Failure(kind, f"{kind} happened"), **fields)


def report_of(traces: list[Trace], concurrency: int = 1, **arguments: Any) -> Report:
    load = ClosedLoop(concurrency)
    cost = arguments.pop("client", COST)
    return build_report(traces, full_window(traces, load), cost, label="server", load=str(load), **arguments)


TWO = [
    trace_of([1.0, 1.5, 2.0, 2.5], reasoning=2, completion_tokens=8, prompt_tokens=10, finish_reason="stop"),
    trace_of([3.0, 4.0], started_s=2.5, completion_tokens=2, prompt_tokens=20, finish_reason="length"),
]


def test_latencies_and_rates() -> None:
    report = report_of([*TWO, failed(started_s=4.0, ended_s=5.0)])
    assert (report.requests, report.succeeded, report.errors) == (3, 2, {"timeout": 1})
    assert report.error_examples == {"timeout": "timeout happened"}
    assert report.finish_reasons == {"stop": 1, "length": 1}
    assert report.samples.ttft_ms == [1000, 500]
    assert report.samples.answer_ms == [2000, 500]
    assert report.samples.itl_ms == [500, 500, 500, 1000]
    assert report.samples.tpot_ms == pytest.approx([1500 / 7, 1000])
    assert report.samples.e2e_ms == [2500, 1500]
    assert report.span_s == 5.0
    assert report.tokens_per_s == 2.0
    assert report.requests_per_s == 0.4
    assert report.output_tokens is not None and report.output_tokens.mean == 5
    assert report.output_tokens_from == "usage"
    assert report.tokens_per_chunk == pytest.approx(10 / 6)
    assert report.joined_chunks == 0
    # One stream: the window is all of the time, and the tokens of the chunks in it are all tokens.
    assert report.window_s == 5.0
    assert report.window_tokens_per_s == pytest.approx(2.0)


def test_the_window_is_when_all_streams_were_on() -> None:
    traces = [
        trace_of([1.0, 2.0, 3.0, 4.0], ended_s=4.0),
        trace_of([2.0, 3.0], started_s=1.5, ended_s=3.0, completion_tokens=4),
        trace_of([3.8, 6.0], started_s=3.0, ended_s=6.0),
    ]
    # At 3.0 one ends and the next begins: the load is still on until the first stream's end.
    assert full_window(traces, ClosedLoop(2)) == (1.5, 4.0)
    report = report_of(traces, 2)
    # In (1.5, 4.0]: 3 chunks of one token, 2 of two tokens, 1 of one.
    assert report.window_tokens_per_s == pytest.approx((3 + 4 + 1) / 2.5)
    assert full_window(traces, ClosedLoop(3)) is None
    assert report_of(traces, 3).window_tokens_per_s is None


def test_refused_requests_are_no_load() -> None:
    """One is let in, fifteen are not: that was one stream, whatever was sent."""
    refused = [failed("http_429", started_s=0.0, ended_s=0.03) for _ in range(15)]
    report = report_of([trace_of([1.0, 2.0]), *refused], 16)
    assert (report.window_s, report.window_tokens_per_s) == (None, None)
    assert "tokens/s and 0.50 requests/s over all; the full load was never on" in shown(show_report(report))
    slow = [trace_of([2.0], started_s=0.1 * n) for n in range(4)]
    report = build_report(slow, full_window(slow, Poisson(10)), COST)
    assert report.window_s == pytest.approx(0.3) and report.window_tokens_per_s is None
    assert "nothing came under full load" in shown(show_report(report))
    # What was begun and then cut was a load.
    cut = [failed("cut", ended_s=2.0), trace_of([1.0, 2.0], ended_s=2.0)]
    assert full_window(cut, ClosedLoop(2)) == (0.0, 2.0)


def test_the_window_of_poisson_arrivals_is_from_the_first_to_the_last() -> None:
    assert full_window(TWO, Poisson(1.0)) == (0.0, 2.5)
    assert full_window(TWO[:1], Poisson(1.0)) is None


def test_tokens_are_chunks_where_no_usage_came() -> None:
    plain = trace_of([1.0, 2.0])
    assert report_of([plain]).output_tokens_from == "chunks"
    assert report_of([plain, *TWO]).output_tokens_from == "usage and chunks"
    assert plain.tokens == 2


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        (Limits(ttft_ms=500), 1),
        (Limits(ttft_ms=1000), 2),
        (Limits(itl_ms=500), 1),
        (Limits(answer_ms=1999), 1),
        (Limits(ttft_ms=1000, itl_ms=500, answer_ms=500), 0),
    ],
)
def test_goodput_counts_failed_requests_as_bad(limits: Limits, good: int) -> None:
    report = report_of([*TWO, failed(ended_s=1.0)], limits=limits)
    assert report.goodput is not None
    assert report.goodput.good == good
    assert report.goodput.share == pytest.approx(good / 3)
    assert report.goodput.per_s == pytest.approx(good / 4)


def test_goodput_needs_limits_and_an_answer_where_one_is_limited() -> None:
    assert report_of(TWO, limits=Limits()).goodput is None
    assert not Limits(answer_ms=1e9).kept_by(trace_of([1.0], reasoning=1))
    assert Limits(itl_ms=1).kept_by(trace_of([1.0]))


def test_budget_outcomes_and_overshoot() -> None:
    def record(**fields: Any) -> Trace:
        return trace_of([1.0], budget={"applied": True, "triggered": False, **fields})

    traces = [
        record(),
        record(triggered=True, trigger="tokens", max_tokens=8, thinking_tokens=8),
        record(triggered=True, trigger="time", max_time_ms=100, thinking_time_ms=130, thinking_tokens=9),
        record(triggered=True, trigger="time", max_time_ms=100, thinking_time_ms=110),
        trace_of([1.0], budget={"applied": False, "triggered": False, "configured": True}),
        trace_of([1.0], budget={"applied": False, "triggered": False, "configured": False}),
        trace_of([1.0]),
    ]
    budgets = report_of(traces).budgets
    assert budgets is not None
    assert (budgets.configured, budgets.applied) == (5, 4)
    assert budgets.triggered == {"time": 2, "tokens": 1}
    assert budgets.overshoot_tokens is not None and budgets.overshoot_tokens.max == 0
    assert budgets.overshoot_ms is not None and budgets.overshoot_ms.p50 == 20
    assert report_of([trace_of([1.0])]).budgets is None
    assert report_of(traces[-2:]).budgets is None  # kiln says of each answer that it had no budget


def test_the_clients_share() -> None:
    assert COST.cpu_share == 0.05
    assert COST.chunks_per_cpu_s == pytest.approx(60)
    assert not COST.was_bottleneck
    assert replace(COST, cpu_s=1.9).was_bottleneck
    assert ClientCost(0.0, 0.0, 0).chunks_per_cpu_s is None


@pytest.mark.parametrize(
    ("gap_s", "ttft_s", "late_ms", "late"),
    [
        (0.00065, 0.020, 5.95, ["gap"]),
        (0.00065, 0.008, 5.95, ["TTFT", "gap"]),
        (0.1, 1.0, 40.0, []),
        (0.1, 1.0, 60.0, ["gap"]),
        (0.00065, 0.1, 1.5, []),  # a timer's own rounding
        (0.1, 1.0, None, []),
    ],
)
def test_lateness_is_judged_by_what_it_is_part_of(
    gap_s: float, ttft_s: float, late_ms: float | None, late: list[str]
) -> None:
    cost = ClientCost(0.1, 2.0, 3, late_timer_ms_p99=late_ms)
    report = report_of([trace_of([ttft_s, ttft_s + gap_s, ttft_s + 2 * gap_s])], client=cost)
    assert report.late_figures == late
    text = shown(show_report(report))
    assert ("kept the client waiting" in text) is bool(late)
    assert all(f"the median {name}" in text for name in late)


@pytest.mark.parametrize(("late_ms", "late"), [(40.0, True), (20.0, False), (1.0, False)])
def test_arrivals_are_late_by_the_time_to_the_first_token(late_ms: float, late: bool) -> None:
    report = report_of([trace_of([0.06])], client=ClientCost(0.1, 2.0, 1, late_dispatch_ms=late_ms))
    assert report.dispatched_late is late
    assert ("arrivals were sent up to" in shown(show_report(report))) is late


def test_nothing_measured_is_none_and_still_shown() -> None:
    report = report_of([], interrupted=True)
    assert (report.ttft_ms, report.window_s, report.tokens_per_chunk) == (None, None, None)
    assert "interrupted" in shown(show_report(report))
    assert json.dumps(report.as_json())


def shown(what: Any) -> str:
    console = Console(width=100, file=io.StringIO())
    with console.capture() as captured:
        console.print(what)
    return captured.get()


def test_the_table_says_what_the_figures_are_worth() -> None:
    joined = trace_of([1.0, 1.0, 1.0], finish_reason="stop")
    busy = ClientCost(1.9, 2.0, 9, late_dispatch_ms=800, late_timer_ms_p99=30)
    text = shown(show_report(report_of([joined, failed("http_503")], client=busy)))
    for words in (
        "1 of 2 succeeded",
        "1 http_503",
        "http_503 happened",
        "chunks counted here",
        "100% of the gaps are 0",
        "client was the bottleneck",
        "800 ms late",
        "timers 30.00 ms late",
        "kept the client waiting",
        "server, 1 stream",
    ):
        assert words in text
    assert "1.67 tokens a chunk" in shown(show_report(report_of(TWO)))


def test_numbers_keep_about_four_figures() -> None:
    assert [number(v) for v in (0.123, 9.5, 123.45, 9876.5)] == ["0.12", "9.50", "123.5", "9876"]


def test_json_has_a_row_for_each_request_and_the_figures() -> None:
    content = json.loads(json.dumps(report_of([*TWO, failed(ended_s=1.0)]).as_json()))
    assert content["ttft_ms"]["max"] == 1000
    assert content["client"]["was_bottleneck"] is False
    rows = content["per_request"]
    assert [row["ttft_ms"] for row in rows] == [1000, 500, None]
    assert rows[1]["started_s"] == 2.5
    assert rows[2]["error"] == {"kind": "timeout", "message": "timeout happened"}


def scaled(factor: float, *also: Trace, prompt: int = 7) -> Report:
    return report_of([trace_of([factor, 2 * factor], completion_tokens=10, prompt_tokens=prompt), *also])


def test_ratios_are_taken_round_by_round() -> None:
    rounds = [(scaled(2.0), scaled(1.0)), (scaled(8.0), scaled(2.0)), (scaled(3.0), scaled(1.0))]
    rows = {row.metric.name: row for row in Comparison(rounds).rows()}
    ttft = rows["TTFT p50"]
    assert (ttft.ratio.low, ttft.ratio.median, ttft.ratio.high) == (2.0, 3.0, 4.0)
    assert (ttft.ratio.q1, ttft.ratio.q3) == (2.5, 3.5)
    assert (ttft.a_median, ttft.b_median) == (3000, 1000)
    assert ttft.better == "B"
    assert rows["overall rate"].better == "B"
    assert rows["output mean"].better == rows["prompt mean"].better == ""
    assert (rows["prompt mean"].a_median, rows["prompt mean"].b_median) == (7, 7)
    assert "goodput share" not in rows  # no limits were given
    text = shown(show_comparison(Comparison(rounds)))
    assert "3 rounds in turn" in text and "2.000..4.000" in text
    assert json.dumps(Comparison(rounds).as_json())


def test_a_comparison_says_which_side_failed() -> None:
    bad = report_of([*TWO, failed("cut", ended_s=9.0)], client=ClientCost(1.9, 2.0, 3))
    text = shown(show_comparison(Comparison([(bad, scaled(1.0))])))
    assert text.index("A: 1 of 3 requests failed (cut)") < text.index("metric")
    assert "A: the client was the bottleneck" in text


def test_fewer_than_three_rounds_name_no_side() -> None:
    for rounds, words in ((1, "1 stream, 1 round\n"), (2, "1 stream, 2 rounds in turn\n")):
        comparison = Comparison([(scaled(2.0), scaled(1.0))] * rounds)
        assert all(row.better == "" for row in comparison.rows())
        text = shown(show_comparison(comparison))
        assert words in "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
        assert "fewer than 3 rounds" in text
    comparison = Comparison([(scaled(2.0), scaled(1.0))] * 3)
    assert {row.metric.name: row.better for row in comparison.rows()}["TTFT p50"] == "B"
    assert comparison.as_json()["ratios"][0]["better"] == "B"


def test_a_side_that_refused_requests_is_not_better() -> None:
    """It answers the few that it takes sooner."""
    refusals = [failed("http_503", ended_s=0.1) for _ in range(14)]
    comparison = Comparison([(scaled(2.0), scaled(1.0, *refusals))] * 3)
    assert all(row.better == "" for row in comparison.rows())
    assert all(row["better"] is None for row in comparison.as_json()["ratios"])
    text = shown(show_comparison(comparison))
    assert text.index("B: 42 of 45 requests failed (http_503)") < text.index("metric")
    assert "no side is called better" in text


def test_unequal_prompts_are_seen() -> None:
    rows = {r.metric.name: r for r in Comparison([(scaled(1.0, prompt=14), scaled(1.0))] * 3).rows()}
    assert rows["prompt mean"].ratio.median == 2 and rows["prompt mean"].better == ""


def test_turns_alternate_who_goes_first() -> None:
    assert [side for _, side in turns(3)] == ["A", "B", "B", "A", "A", "B"]
    order: list[tuple[str, int]] = []

    def measured(name: str, value: float, n: int) -> float:
        order.append((name, n))
        return value * (n + 1)

    ratio, a, b = compare_figures(lambda n: measured("a", 6, n), lambda n: measured("b", 3, n), 2)
    assert order == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    assert (ratio.low, ratio.high, a, b) == (2, 2, 9, 4.5)


def test_axes_are_linear_or_logarithmic_by_span() -> None:
    assert choose_axis([10, 20, 50]) == Axis(0.0, 52.5, False)
    wide = choose_axis([1, 10, 1000])
    assert wide.log
    assert 0 <= wide.place(1) < wide.place(10) < wide.place(1000) < 1
    assert wide.place(0) == 0
    for axis in (wide, Axis(0, 0.7, False), Axis(0.02, 90, True), choose_axis([]), choose_axis([0.0])):
        ticks = axis.ticks()
        assert 2 <= len(ticks) <= 20
        assert all(0 <= axis.place(tick) <= 1.000001 for tick in ticks)


def test_cdf_points_rise_to_one() -> None:
    points = cdf_points(sorted(float(n) for n in range(5000)))
    assert len(points) == chart.MAX_POINTS
    assert points[0] == (0, 0) and points[-1] == (4999, 1)
    assert points == sorted(points)
    assert cdf_points([5.0]) == [(5.0, 0.0), (5.0, 1.0)]


def test_the_svg_is_xml_with_a_line_for_each_series_and_panel(tmp_path: Path) -> None:
    a, b = report_of(TWO), replace(scaled(1.0), label="<b> & c")
    save_plot(tmp_path / "p.svg", [a, b, b])
    root = ET.fromstring((tmp_path / "p.svg").read_text())
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f".//{space}polyline")) == 8
    texts = [element.text for element in root.iter(f"{space}text")]
    assert "<b> & c, 1 stream" in texts and "p99" in texts and "Time to first token" in texts
    assert len(series_of([a, b, b])) == 2
    assert "none" in draw_svg([Series("empty", {key: [] for key, _ in chart.PANELS})])


def test_a_png_is_drawn_where_matplotlib_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_plot(tmp_path / "p.png", [report_of(TWO)])
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_made_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="must end with"):
        save_plot(tmp_path / "p.gif", [])
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="matplotlib") as caught:
        save_plot(tmp_path / "p.png", [])
    assert "pip install matplotlib" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="cannot be written"):
        save_plot(tmp_path / "no" / "p.svg", [])
