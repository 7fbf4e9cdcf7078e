"""Reports and comparisons as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kiln.core.wording import counted
from kiln.loadgen.compare import LEAST_ROUNDS, Comparison
from kiln.loadgen.quantiles import Summary
from kiln.loadgen.report import BudgetOutcomes, Report

SEVERAL_TOKENS_A_CHUNK = 1.5
JOINED_WORTH_A_NOTE = 0.05


def show_report(report: Report) -> RenderableType:
    """The figures of one load: latencies as a table, everything else as lines under it."""
    head = Text(f"{report.label}, {report.load}")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("ms")
    for name in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    rows: tuple[tuple[str, Summary | None], ...] = (
        ("TTFT", report.ttft_ms),
        ("first answer token", report.answer_ms),
        ("inter-token gap", report.itl_ms),
        ("time a token", report.tpot_ms),
        ("end to end", report.e2e_ms),
    )
    for name, summary in rows:
        table.add_row(name, *_cells(summary))
    return Group(head, table, Text("\n".join(_lines(report))))


def show_comparison(comparison: Comparison) -> RenderableType:
    """Ratios A/B with their spread; a side that every round agrees on is named. Failures come first."""
    first_a, first_b = comparison.rounds[0]
    count = len(comparison.rounds)
    sides = (("A", [a for a, _ in comparison.rounds]), ("B", [b for _, b in comparison.rounds]))
    head = Text(f"{first_a.label}\n{first_b.label}\n{first_a.load}, {counted(count, 'round')}")
    head.append(" in turn" if count > 1 else "")
    failures = [note for side in sides for note in _failures(*side)]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("metric", no_wrap=True)
    for name in ("A/B", "min..max", "quartiles", "A", "B"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("better")
    for row in comparison.rows():
        ratio = row.ratio
        table.add_row(
            f"{row.metric.name}, {row.metric.unit}" if row.metric.unit else row.metric.name,
            f"{ratio.median:.3f}",
            f"{ratio.low:.3f}..{ratio.high:.3f}",
            f"{ratio.q1:.3f}..{ratio.q3:.3f}",
            number(row.a_median),
            number(row.b_median),
            row.better,
        )
    notes = [note for side in sides for note in _side_notes(*side)]
    if failures:
        notes.append("no side is called better: the failed requests are work that the others did not have")
    elif count < LEAST_ROUNDS:
        notes.append(f"no side is called better: fewer than {LEAST_ROUNDS} rounds show no spread")
    return Group(head, *map(Text, failures), table, *map(Text, notes))


def _failures(name: str, reports: list[Report]) -> Iterator[str]:
    failed = sum(report.requests - report.succeeded for report in reports)
    if failed:
        kinds = sorted({kind for report in reports for kind in report.errors})
        yield f"{name}: {failed} of {sum(r.requests for r in reports)} requests failed ({', '.join(kinds)})"


def _side_notes(name: str, reports: list[Report]) -> Iterator[str]:
    late = sorted({figure for report in reports for figure in report.late_figures})
    if late:
        yield f"{name}: the machine kept the client waiting; {' and '.join(late)} may be its own in part"
    if any(report.client.was_bottleneck for report in reports):
        yield f"{name}: the client was the bottleneck in at least one round; the ratios cannot be trusted"
    if any(report.output_tokens_from != "usage" for report in reports):
        yield f"{name}: output tokens are chunks counted here, as not every answer reported its usage"


def _cells(summary: Summary | None) -> list[str]:
    if summary is None:
        return ["–"] * 5
    return [number(v) for v in (summary.mean, summary.p50, summary.p90, summary.p99, summary.max)]


def number(value: float) -> str:
    """About four significant figures, without an exponent."""
    size = abs(value)
    return f"{value:.0f}" if size >= 1000 else f"{value:.1f}" if size >= 100 else f"{value:.2f}"


def _lines(report: Report) -> Iterator[str]:
    if report.interrupted:
        yield "interrupted: only the requests that had ended are counted"
    failed = "" if not report.errors else ", " + ", ".join(f"{n} {kind}" for kind, n in report.errors.items())
    yield f"requests    {report.succeeded} of {report.requests} succeeded in {report.span_s:.2f} s{failed}"
    for kind, message in report.error_examples.items():
        yield f"            {kind}: {message}"
    yield from _throughput(report)
    yield from _tokens(report)
    if report.goodput is not None:
        share, rate = report.goodput.share, number(report.goodput.per_s)
        yield f"goodput     {share:.1%} of all requests within the limits, {rate} requests/s"
    if report.budgets is not None:
        yield from _budgets(report.budgets)
    yield from _client(report)


def _throughput(report: Report) -> Iterator[str]:
    whole = f"{number(report.tokens_per_s)} tokens/s and {number(report.requests_per_s)} requests/s"
    if report.window_tokens_per_s is None or report.window_s is None:
        why = "the full load was never on" if report.window_s is None else "nothing came under full load"
        yield f"throughput  {whole} over all; {why}"
    else:
        rate = number(report.window_tokens_per_s)
        yield f"throughput  {rate} tokens/s in the {report.window_s:.2f} s under full load"
        yield f"            {whole} over all"


def _tokens(report: Report) -> Iterator[str]:
    if report.prompt_tokens is not None:
        cached = "" if report.cached_tokens is None else f", {report.cached_tokens.mean:.0f} of them cached"
        yield f"prompt      {report.prompt_tokens.mean:.0f} tokens in the mean{cached}"
    if report.output_tokens is not None:
        reasons = ", ".join(f"{n} {reason}" for reason, n in report.finish_reasons.items())
        source = {"usage": "counted by the server", "chunks": "chunks counted here, as no usage came"}
        counted = source.get(report.output_tokens_from, "counted by the server where it did, else chunks")
        yield f"output      {report.output_tokens.mean:.1f} tokens in the mean, {counted}; ended by {reasons}"
    per_chunk, joined = report.tokens_per_chunk, report.joined_chunks
    if per_chunk is not None and per_chunk >= SEVERAL_TOKENS_A_CHUNK:
        yield f"            {per_chunk:.2f} tokens a chunk: inter-token gaps are those of chunks"
    if joined is not None and joined >= JOINED_WORTH_A_NOTE:
        yield f"            {joined:.0%} of the gaps are 0: those chunks arrived together"


def _budgets(budgets: BudgetOutcomes) -> Iterator[str]:
    triggered = ", ".join(f"{n} by {trigger}" for trigger, n in budgets.triggered.items()) or "none triggered"
    yield f"budgets     applied to {budgets.applied} of {budgets.configured}; {triggered}"
    for name, overshoot in (("tokens", budgets.overshoot_tokens), ("ms", budgets.overshoot_ms)):
        if overshoot is not None:
            p50, most = number(overshoot.p50), number(overshoot.max)
            yield f"            overshoot of a triggered budget: {p50} {name} p50, {most} {name} max"


def _client(report: Report) -> Iterator[str]:
    client = report.client
    rate = client.chunks_per_cpu_s
    speed = "" if rate is None else f", {rate:.0f} chunks a CPU second"
    late = client.late_timer_ms_p99
    timer = "" if late is None else f", timers {number(late)} ms late at p99"
    yield f"client      {client.cpu_share:.1%} of one core{speed}{timer}"
    if report.late_figures:
        figures = " and ".join(f"the median {name}" for name in report.late_figures)
        yield f"            the machine kept the client waiting, by over half of {figures}"
    if client.was_bottleneck:
        yield "            the client was the bottleneck: these figures are not the server's"
    if report.dispatched_late:
        yield f"            arrivals were sent up to {client.late_dispatch_ms:.0f} ms late"
