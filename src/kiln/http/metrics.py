"""Prometheus metrics. Labels have fixed vocabularies; numbers from requests never become labels."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kiln.core.budgets import Outcome
from kiln.core.completion import ExchangeHead
from kiln.engine.ports import EngineStats
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


class Metrics:
    """All metrics of one server. Implements the chat room's `Observer`."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
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
            "kiln_generated_tokens", "Tokens generated in finished completions.", registry=self._registry
        )
        self._prompt = Counter(
            "kiln_prompt_tokens", "Prompt tokens of accepted requests.", registry=self._registry
        )
        self._responses = Counter(
            "kiln_http_responses", "HTTP responses by status class.", ("status",), registry=self._registry
        )
        for outcome in BUDGET_OUTCOMES:
            self._outcomes.labels(outcome)
        for dimension in ("tokens", "time"):
            for source in BUDGET_SOURCES:
                self._sources.labels(dimension, source)
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

    def choice_ended(self, head: ExchangeHead, outcome: Outcome | None, finished: bool, tokens: int) -> None:
        name = metric_outcome(head.budget, applied=head.budget_applied, outcome=outcome, finished=finished)
        self._outcomes.labels(name).inc()
        self._generated.inc(tokens)

    def response_sent(self, status: int) -> None:
        self._responses.labels(f"{status // 100}xx").inc()

    def render(self) -> bytes:
        """The Prometheus text exposition."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, doc: str, read: Callable[[], int]) -> None:
        Gauge(name, doc, registry=self._registry).set_function(lambda: float(read()))
