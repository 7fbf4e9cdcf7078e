"""How thinking limits resolve, and the record that reports them.

Contract: seed 001, with the record tables of the project's contract. Two dimensions (tokens,
milliseconds) resolve independently; each override has three states: absent = inherit the layer
below, null = unlimited, an integer >= 0 = that limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from msgspec import UNSET, UnsetType

from kiln.core.budgets import Budget, Limit, Outcome
from kiln.wire.thinking import ThinkingBudgetOutcome, ThinkingBudgetRecentRecord, ThinkingBudgetRecord

Override = int | None | UnsetType


class Layer(StrEnum):
    """Who may set a limit, from the weakest to the strongest, above the server's default."""

    SUITE = "suite"
    EXAMPLE = "example"
    RUN_OVERRIDE = "run_override"
    REQUEST = "request"


def resolve_limit(server_default: int | None, layers: Iterable[tuple[Layer, Override]] = ()) -> Limit:
    """Resolve one dimension. The strongest layer that says anything decides.

    >>> resolve_limit(512, [(Layer.REQUEST, None)])
    Limit(value=None, source='request_unlimited')
    """
    resolved = Limit(server_default, "unlimited" if server_default is None else "server_default")
    order = list(Layer)
    for layer, override in sorted(layers, key=lambda pair: order.index(pair[0])):
        if isinstance(override, UnsetType):
            continue
        if override is None:
            resolved = Limit(None, f"{layer}_unlimited")
        else:
            resolved = Limit(override, str(layer))
    return resolved


def resolve_budget(
    *,
    default_tokens: int | None,
    default_time_ms: int | None,
    request_tokens: Override = UNSET,
    request_time_ms: Override = UNSET,
) -> Budget:
    """The server's resolution: a request's overrides over the server's defaults."""
    return Budget(
        tokens=resolve_limit(default_tokens, [(Layer.REQUEST, request_tokens)]),
        time_ms=resolve_limit(default_time_ms, [(Layer.REQUEST, request_time_ms)]),
    )


def applies(budget: Budget, *, starts_in_reasoning: bool, max_tokens: int) -> bool:
    """Whether a budget is enforced: it needs a reasoning prompt, a finite limit and a completion token."""
    return budget.configured and starts_in_reasoning and max_tokens >= 1


def to_record(budget: Budget, *, applied: bool, outcome: Outcome | None) -> ThinkingBudgetRecord:
    """The flat version 1 record of one completion. `outcome` is given exactly when the budget applied."""
    record = ThinkingBudgetRecord(
        configured=budget.configured,
        tokens_source=budget.tokens.source,
        time_source=budget.time_ms.source,
        applied=applied,
        triggered=False,
        max_tokens=UNSET if budget.tokens.value is None else budget.tokens.value,
        max_time_ms=UNSET if budget.time_ms.value is None else budget.time_ms.value,
    )
    if outcome is not None:
        set_outcome(record, outcome)
    return record


def set_outcome(record: ThinkingBudgetRecord | ThinkingBudgetRecentRecord, outcome: Outcome) -> None:
    """Write into a record how the thinking of its request ended."""
    record.triggered = outcome.trigger is not None
    if outcome.trigger is not None:
        record.trigger = str(outcome.trigger)
    record.closed = outcome.closed
    record.thinking_tokens = outcome.thinking_tokens
    record.thinking_time_ms = outcome.thinking_time_ms


def to_outcome(outcome: Outcome) -> ThinkingBudgetOutcome:
    """The per-choice outcome object."""
    return ThinkingBudgetOutcome(
        triggered=outcome.trigger is not None,
        closed=outcome.closed,
        thinking_tokens=outcome.thinking_tokens,
        thinking_time_ms=outcome.thinking_time_ms,
        trigger=UNSET if outcome.trigger is None else str(outcome.trigger),
    )


def metric_outcome(budget: Budget, *, applied: bool, outcome: Outcome | None, finished: bool) -> str:
    """The `outcome` label of kiln_thinking_budget_outcomes_total: one of the contract's nine names.

    `finished` is False for a completion that was cut by a disconnect, a cancellation or a failure.
    """
    if outcome is not None and outcome.interrupted:
        return "interrupted"
    if not budget.configured:
        return "unconfigured"
    if not applied:
        return "inert"
    if outcome is None:
        return "unresolved"
    if outcome.trigger is not None:
        return str(outcome.trigger)
    if outcome.closed:
        return "natural_close"
    return "unclosed" if finished else "unresolved"
