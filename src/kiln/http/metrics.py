"""Prometheus metrics. Labels have fixed vocabularies; numbers from requests never become labels."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kiln.chat.telemetry.observe import ChoiceReport
from kiln.core.budgets import Budget
from kiln.core.completion import ExchangeHead
from kiln.core.errors import KilnError
from kiln.engine.ports import EngineStats
from kiln.native.calls import CallEnd, CallKind
from kiln.thinking.budget import metric_outcome

BUDGET_OUTCOMES = (
    "unconfigured",
    "inert",
    "natural_close",
    "tokens",
    "time",
    "max_tokens",
    "unclosed",
    "interrupted",
    "unresolved",
)
BUDGET_SOURCES = ("unlimited", "server_default", "request", "request_unlimited")

_TOKEN_BUCKETS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)
_SECOND_BUCKETS = (0, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300)
_FIRST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_GAP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 5)
_CALL_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60)
PHASES = ("tokenization", "queue", "admission", "prefill", "decode", "sampling", "adapter", "unexplained")
STALL_SECONDS = 0.25


class Metrics:
    """All metrics of one server. Implements the chat room's `Observer`."""

    def __init__(self, stats: Callable[[], EngineStats], cache_counts: Mapping[str, int]) -> None:
        self._registry = CollectorRegistry()
        self._sources = Counter(
            "kiln_thinking_budget_source",
            "Authority that decided each thinking limit, counted per request.",
            ("dimension", "source"),
            registry=self._registry,
        )
        self._outcomes = Counter(
            "kiln_thinking_budget_outcomes",
            "What became of the thinking budget, counted per completion.",
            ("outcome",),
            registry=self._registry,
        )
        self._tokens = Histogram(
            "kiln_thinking_budget_effective_tokens",
            "Finite thinking-token limits in force, per request.",
            buckets=_TOKEN_BUCKETS,
            registry=self._registry,
        )
        self._seconds = Histogram(
            "kiln_thinking_budget_effective_seconds",
            "Finite thinking-time limits in force, per request.",
            buckets=_SECOND_BUCKETS,
            registry=self._registry,
        )
        self._generated = Counter(
            "kiln_generated_tokens", "Tokens of completions that ended.", registry=self._registry
        )
        self._prompt = Counter(
            "kiln_prompt_tokens", "Prompt tokens of accepted requests.", registry=self._registry
        )
        self._responses = Counter(
            "kiln_http_responses", "HTTP responses by status class.", ("status",), registry=self._registry
        )
        self._completions = self._counter(
            "kiln_completions", "Completions by how they ended.", ("finish_reason",)
        )
        self._connections = self._counter(
            "kiln_refused_connections", "Connections closed before a request was taken from them.", ("code",)
        )
        self._refused = self._counter(
            "kiln_refused_turns", "Requests for a turn that were refused before it began.", ("code",)
        )
        self._phases = self._counter(
            "kiln_phase_seconds", "Time of completions that ended, by phase.", ("phase",)
        )
        self._stalls = self._counter("kiln_stalls", "Stalls of completions by cause.", ("reason",))
        self._ttft = self._histogram(
            "kiln_time_to_first_token_seconds", "From the request to its first token.", _FIRST_BUCKETS
        )
        self._tool_calls = self._counter(
            "kiln_tool_calls", "Calls of server tools and skills by how they ended.", ("kind", "outcome")
        )
        self._tool_seconds = self._histogram(
            "kiln_tool_call_seconds",
            "Time that calls of server tools and skills ran.",
            _CALL_BUCKETS,
            ("kind",),
        )
        self._embeddings = self._counter(
            "kiln_embedding_requests", "Requests for embeddings by how they ended.", ("outcome",)
        )
        self._embedding_inputs = self._counter(
            "kiln_embedding_inputs", "Inputs of embedding requests that were answered."
        )
        self._embedding_tokens = self._counter(
            "kiln_embedding_tokens", "Tokens of embedding requests that were answered."
        )
        self._embedding_seconds = self._histogram(
            "kiln_embedding_request_seconds", "From an embedding request to its vectors.", _CALL_BUCKETS
        )
        self._itl = _GapHistogram()
        self._registry.register(self._itl)
        for outcome in BUDGET_OUTCOMES:
            self._outcomes.labels(outcome)
        for dimension in ("tokens", "time"):
            for source in BUDGET_SOURCES:
                self._sources.labels(dimension, source)
        self._registry.register(_Totals(stats, cache_counts))
        self._gauge("kiln_engine_running", "Sequences being computed.", lambda: stats().running)
        self._gauge("kiln_engine_waiting", "Sequences waiting for a slot.", lambda: stats().waiting)
        self._gauge("kiln_kv_cells_used", "Tokens in the KV cache.", lambda: stats().kv_cells_used)
        self._gauge("kiln_kv_cells", "Tokens that the KV cache can hold.", lambda: stats().kv_cells)

    def exchange_started(self, head: ExchangeHead) -> None:
        budget = head.budget
        self._sources.labels("tokens", budget.tokens.source).inc()
        self._sources.labels("time", budget.time_ms.source).inc()
        if budget.tokens.value is not None:
            self._tokens.observe(budget.tokens.value)
        if budget.time_ms.value is not None:
            self._seconds.observe(budget.time_ms.value / 1000)
        self._prompt.inc(head.prompt_tokens)

    def token_gaps(self, gaps: array[float], ended: float) -> None:
        self._itl.observe(gaps)

    def choice_ended(self, head: ExchangeHead, report: ChoiceReport) -> None:
        name = metric_outcome(
            head.budget, applied=head.budget_applied, outcome=report.outcome, finished=report.finished
        )
        self._outcomes.labels(name).inc()
        self._generated.inc(report.completion_tokens)
        self._completions.labels(report.reason).inc()
        latency = report.latency
        if latency.ttft_ms is not None:
            self._ttft.observe(latency.ttft_ms / 1000)
        for phase in PHASES:
            milliseconds = getattr(latency, f"{phase}_ms")
            if milliseconds is not None:
                self._phases.labels(phase).inc(milliseconds / 1000)
        for reason, count in latency.stall_reasons.items():
            self._stalls.labels(reason).inc(count)

    def turn_refused(self, budget: Budget, error: KilnError) -> None:
        """Its request is counted where it is answered, once, whatever refused it."""

    def refused(self, code: str) -> None:
        """A request was answered with an error before its turn began."""
        self._refused.labels(code).inc()

    def tool_called(self, kind: CallKind, end: CallEnd, seconds: float | None) -> None:
        """A call that kiln answered itself ended. `seconds` is None where nothing was run."""
        self._tool_calls.labels(kind, end).inc()
        if seconds is not None:
            self._tool_seconds.labels(kind).observe(seconds)

    def embedded(self, inputs: int, tokens: int, seconds: float) -> None:
        """A request for embeddings has its vectors."""
        self._embeddings.labels("done").inc()
        self._embedding_inputs.inc(inputs)
        self._embedding_tokens.inc(tokens)
        self._embedding_seconds.observe(seconds)

    def not_embedded(self, outcome: Literal["refused", "failed", "cancelled"]) -> None:
        self._embeddings.labels(outcome).inc()

    def connection_refused(self, error: KilnError) -> None:
        self._connections.labels(error.code).inc()

    def response_sent(self, status: int) -> None:
        self._responses.labels(f"{status // 100}xx").inc()

    def render(self) -> bytes:
        """The Prometheus text exposition."""
        return generate_latest(_Page(self._registry))

    def _counter(self, name: str, doc: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(name, doc, labels, registry=self._registry)

    def _histogram(
        self, name: str, doc: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
    ) -> Histogram:
        return Histogram(name, doc, labels, buckets=buckets, registry=self._registry)

    def _gauge(self, name: str, doc: str, read: Callable[[], int]) -> None:
        Gauge(name, doc, registry=self._registry).set_function(lambda: float(read()))


class _Page(Collector):
    """What a registry collects without the times at which its series began: they double the page, and
    the library can only be told so for the whole process, which may have metrics of its own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            family.samples = [s for s in family.samples if s.name != f"{family.name}_created"]
            yield family


class _GapHistogram(Collector):
    """Gaps between tokens. Observed for every token, so a gap costs a bisection and two additions."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_GAP_BUCKETS) + 1)
        self._sum = 0.0

    def observe(self, gaps: array[float]) -> None:
        for seconds in gaps:
            self._counts[bisect_left(_GAP_BUCKETS, seconds)] += 1
        self._sum += sum(gaps)

    def collect(self) -> Iterable[Metric]:
        bounds = [*(str(bound) for bound in _GAP_BUCKETS), "+Inf"]
        yield HistogramMetricFamily(
            "kiln_inter_token_latency_seconds",
            "Between two tokens of one completion.",
            buckets=list(zip(bounds, accumulate(self._counts), strict=True)),
            sum_value=self._sum,
        )
        stalls = sum(self._counts[bisect_left(_GAP_BUCKETS, STALL_SECONDS) + 1 :])
        yield CounterMetricFamily(
            "kiln_long_token_gaps", "Gaps between tokens of more than 250 ms.", value=stalls
        )


class _Totals(Collector):
    """Counts that the engine keeps itself."""

    def __init__(self, stats: Callable[[], EngineStats], cache_counts: Mapping[str, int]) -> None:
        self._stats = stats
        self._cache_counts = cache_counts

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        totals = (
            ("kiln_engine_steps", "Engine steps.", stats.steps),
            ("kiln_preemptions", "Sequences preempted for want of KV cells.", stats.preemptions),
            ("kiln_engine_restarts", "Engine processes that died or hung and were replaced.", stats.restarts),
            (
                "kiln_prompt_tokens_restored",
                "Prompt tokens copied back from the host's memory.",
                stats.prompt_tokens_restored,
            ),
            ("kiln_tokens_drafted", "Tokens drafted by speculation.", stats.tokens_drafted),
            ("kiln_drafts_accepted", "Drafted tokens that were picked.", stats.drafts_accepted),
            ("kiln_adapter_switches", "Changes of the LoRA adapters in force.", stats.adapter_switches),
            ("kiln_prompt_tokens_computed", "Prompt tokens computed.", stats.prompt_tokens_computed),
            ("kiln_prompt_tokens_cached", "Prompt tokens from the prefix cache.", stats.prompt_tokens_cached),
        )
        for name, doc, value in totals:
            yield CounterMetricFamily(name, doc, value=value)
        cache = CounterMetricFamily(
            "kiln_completion_cache", "Generations by what the completion cache did.", labels=("result",)
        )
        for result, count in self._cache_counts.items():
            cache.add_metric((result,), count)
        yield cache
