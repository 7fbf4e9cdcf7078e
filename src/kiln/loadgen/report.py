"""From traces to figures. docs/bench.md defines every one of them in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kiln.loadgen.client.trace import Trace
from kiln.loadgen.quantiles import Summary, quantile, summarize

# A client thread that computes for more than this share of the time may itself be what is measured.
BUSY_CLIENT_SHARE = 0.7
# A client that is late by this share of a median adds as much to what it measures.
LATE_SHARE = 0.5
# Event loops round their timers to a millisecond, so a little lateness is none.
TIMER_ROUNDING_MS = 2.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What a good request keeps to, in milliseconds; None is no limit. `itl_ms` holds for its p99 gap."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    answer_ms: float | None = None

    @property
    def any(self) -> bool:
        return not (self.ttft_ms is None and self.itl_ms is None and self.answer_ms is None)

    def kept_by(self, trace: Trace) -> bool:
        gaps = sorted(trace.gaps_s())
        return (
            trace.ok
            and _within(trace.ttft_s, self.ttft_ms)
            and _within(trace.answer_s, self.answer_ms)
            and _within(quantile(gaps, 0.99) if gaps else 0.0, self.itl_ms)
        )


def _within(seconds: float | None, limit_ms: float | None) -> bool:
    return limit_ms is None or (seconds is not None and seconds * 1000 <= limit_ms)


@dataclass(frozen=True, slots=True)
class Goodput:
    """`share` of all requests, failed ones included; `per_s` over the span of the load."""

    limits: Limits
    good: int
    share: float
    per_s: float


@dataclass(frozen=True, slots=True)
class BudgetOutcomes:
    """Thinking budgets as kiln reports them, of `configured` requests that had one.

    Overshoot is what a triggered limit was exceeded by.
    """

    configured: int
    applied: int
    triggered: dict[str, int]
    overshoot_tokens: Summary | None
    overshoot_ms: Summary | None


@dataclass(frozen=True, slots=True)
class ClientCost:
    """The load generator's own share. `cpu_s` is the time its thread computed within `wall_s`;
    `late_timer_ms_p99` is how late its event loop came to a regular timer."""

    cpu_s: float
    wall_s: float
    chunks: int
    late_dispatch_ms: float = 0.0
    late_timer_ms_p99: float | None = None

    @property
    def cpu_share(self) -> float:
        return self.cpu_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def chunks_per_cpu_s(self) -> float | None:
        return self.chunks / self.cpu_s if self.cpu_s > 0 else None

    @property
    def was_bottleneck(self) -> bool:
        return self.cpu_share > BUSY_CLIENT_SHARE


@dataclass(frozen=True, slots=True)
class Samples:
    """All single values of the successful requests, in milliseconds."""

    ttft_ms: list[float] = field(default_factory=list)
    answer_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    e2e_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Report:
    """One load, measured. Latencies are in milliseconds; None means not measured."""

    label: str
    load: str
    requests: int
    succeeded: int
    errors: dict[str, int]
    error_examples: dict[str, str]
    finish_reasons: dict[str, int]
    span_s: float
    window_s: float | None
    window_tokens_per_s: float | None
    tokens_per_s: float
    requests_per_s: float
    ttft_ms: Summary | None
    answer_ms: Summary | None
    itl_ms: Summary | None
    tpot_ms: Summary | None
    e2e_ms: Summary | None
    prompt_tokens: Summary | None
    cached_tokens: Summary | None
    output_tokens: Summary | None
    output_tokens_from: str
    tokens_per_chunk: float | None
    joined_chunks: float | None
    goodput: Goodput | None
    budgets: BudgetOutcomes | None
    client: ClientCost
    interrupted: bool
    samples: Samples
    traces: list[Trace]

    @property
    def late_figures(self) -> list[str]:
        """The figures so small that the client's own lateness may be a good part of them."""
        late = self.client.late_timer_ms_p99
        figures = (("TTFT", self.ttft_ms), ("gap", self.itl_ms))
        return [name for name, figure in figures if late is not None and _weighs(late, figure)]

    @property
    def dispatched_late(self) -> bool:
        """Whether an arrival came so late that its time to the first token is another."""
        return _weighs(self.client.late_dispatch_ms, self.ttft_ms)

    def as_json(self) -> dict[str, Any]:
        """Every figure, and one row for each request."""
        whole = {
            name: getattr(self, name)
            for name in self.__slots__
            if name not in ("samples", "traces", "client")
        }
        for name, value in whole.items():
            if hasattr(value, "__dataclass_fields__"):
                whole[name] = asdict(value)
        client = asdict(self.client) | {
            "cpu_share": self.client.cpu_share,
            "chunks_per_cpu_s": self.client.chunks_per_cpu_s,
            "was_bottleneck": self.client.was_bottleneck,
        }
        first = min((trace.started_s for trace in self.traces), default=0.0)
        return whole | {"client": client, "per_request": [_row(trace, first) for trace in self.traces]}


def _weighs(late_ms: float, figure: Summary | None) -> bool:
    return figure is not None and late_ms > max(TIMER_ROUNDING_MS, LATE_SHARE * figure.p50)


def build_report(
    traces: Sequence[Trace],
    window: tuple[float, float] | None,
    client: ClientCost,
    *,
    label: str = "",
    load: str = "",
    limits: Limits | None = None,
    interrupted: bool = False,
) -> Report:
    """The figures of a load. `window` is when all of it was on (see `load.full_window`)."""
    good = [trace for trace in traces if trace.ok]
    failures = [trace.failure for trace in traces if trace.failure is not None]
    span_s = _span_s(traces)
    samples = collect_samples(good)
    chunks = sum(len(trace.times_s) for trace in good)
    tokens = sum(trace.tokens for trace in good)
    return Report(
        label=label,
        load=load,
        requests=len(traces),
        succeeded=len(good),
        errors=dict(Counter(failure.kind for failure in failures).most_common()),
        error_examples={failure.kind: failure.message for failure in reversed(failures)},
        finish_reasons=dict(Counter(str(trace.finish_reason) for trace in good).most_common()),
        span_s=span_s,
        window_s=None if window is None else window[1] - window[0],
        window_tokens_per_s=window_rate(traces, window),
        tokens_per_s=tokens / span_s if span_s > 0 else 0.0,
        requests_per_s=len(good) / span_s if span_s > 0 else 0.0,
        ttft_ms=summarize(samples.ttft_ms),
        answer_ms=summarize(samples.answer_ms),
        itl_ms=summarize(samples.itl_ms),
        tpot_ms=summarize(samples.tpot_ms),
        e2e_ms=summarize(samples.e2e_ms),
        prompt_tokens=summarize(t.prompt_tokens for t in good if t.prompt_tokens is not None),
        cached_tokens=summarize(t.cached_tokens for t in good if t.cached_tokens is not None),
        output_tokens=summarize(trace.tokens for trace in good),
        output_tokens_from=_token_source(good),
        tokens_per_chunk=tokens / chunks if chunks else None,
        joined_chunks=_joined(good, len(samples.itl_ms)),
        goodput=_goodput(traces, limits, span_s),
        budgets=budget_outcomes(good),
        client=client,
        interrupted=interrupted,
        samples=samples,
        traces=list(traces),
    )


def collect_samples(traces: Sequence[Trace]) -> Samples:
    return Samples(
        ttft_ms=[t.ttft_s * 1000 for t in traces if t.ttft_s is not None],
        answer_ms=[t.answer_s * 1000 for t in traces if t.answer_s is not None],
        itl_ms=[gap * 1000 for t in traces for gap in t.gaps_s()],
        tpot_ms=[t.tpot_s * 1000 for t in traces if t.tpot_s is not None],
        e2e_ms=[t.e2e_s * 1000 for t in traces if t.e2e_s is not None],
    )


def window_rate(traces: Sequence[Trace], window: tuple[float, float] | None) -> float | None:
    """Output tokens a second that came inside the window; each chunk of a request counts for
    its tokens divided by its chunks. Failed requests count what they gave. None where nothing came."""
    if window is None or window[1] <= window[0]:
        return None
    start, end = window
    tokens = 0.0
    for trace in traces:
        if trace.times_s:
            inside = sum(1 for time_s in trace.times_s if start < time_s <= end)
            tokens += inside * trace.tokens / len(trace.times_s)
    return tokens / (end - start) if tokens else None


def budget_outcomes(traces: Sequence[Trace]) -> BudgetOutcomes | None:
    """None unless a response carried kiln's record of a budget; kiln also records that there was none."""
    records = [
        trace.budget
        for trace in traces
        if trace.budget is not None and trace.budget.get("configured") is not False
    ]
    if not records:
        return None
    triggers = Counter(str(r.get("trigger")) for r in records if r.get("triggered"))
    return BudgetOutcomes(
        configured=len(records),
        applied=sum(1 for r in records if r.get("applied")),
        triggered=dict(triggers.most_common()),
        overshoot_tokens=summarize(_overshoot(records, "tokens", "thinking_tokens", "max_tokens")),
        overshoot_ms=summarize(_overshoot(records, "time", "thinking_time_ms", "max_time_ms")),
    )


def _overshoot(records: Sequence[dict[str, Any]], trigger: str, used: str, limit: str) -> list[float]:
    return [
        float(record[used] - record[limit])
        for record in records
        if record.get("trigger") == trigger and type(record.get(used)) is type(record.get(limit)) is int
    ]


def _goodput(traces: Sequence[Trace], limits: Limits | None, span_s: float) -> Goodput | None:
    if limits is None or not limits.any or not traces:
        return None
    good = sum(1 for trace in traces if limits.kept_by(trace))
    return Goodput(limits, good, good / len(traces), good / span_s if span_s > 0 else 0.0)


def _span_s(traces: Sequence[Trace]) -> float:
    ends = [trace.ended_s for trace in traces if trace.ended_s is not None]
    return max(ends) - min(trace.started_s for trace in traces) if ends else 0.0


def _token_source(traces: Sequence[Trace]) -> str:
    counted = sum(1 for trace in traces if trace.completion_tokens is not None)
    if counted == len(traces):
        return "usage"
    return "chunks" if counted == 0 else "usage and chunks"


def _joined(traces: Sequence[Trace], gaps: int) -> float | None:
    """Share of the gaps that are exactly zero: both chunks came out of one read."""
    if gaps == 0:
        return None
    return sum(1 for trace in traces for gap in trace.gaps_s() if gap == 0) / gaps


def _row(trace: Trace, first_s: float) -> dict[str, Any]:
    gaps = sorted(trace.gaps_s())
    return {
        "started_s": trace.started_s - first_s,
        "ttft_ms": _ms(trace.ttft_s),
        "answer_ms": _ms(trace.answer_s),
        "e2e_ms": _ms(trace.e2e_s),
        "itl_p50_ms": _ms(quantile(gaps, 0.5)) if gaps else None,
        "itl_p99_ms": _ms(quantile(gaps, 0.99)) if gaps else None,
        "prompt_tokens": trace.prompt_tokens,
        "cached_tokens": trace.cached_tokens,
        "output_tokens": trace.tokens,
        "chunks": len(trace.times_s),
        "finish_reason": trace.finish_reason,
        "thinking_budget": trace.budget,
        "error": None if trace.failure is None else asdict(trace.failure),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
