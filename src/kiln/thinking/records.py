"""Reading thinking-budget records that were written elsewhere, and writing those of recent requests.

Contract: seed 001 and `contracts/thinking-budget-v1.schema.json`. A record is flat. Older evaluation
files hold a nested form, the outcome as an object (or null) under `outcome`: it is read, never written.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from kiln.core.budgets import Budget, Outcome
from kiln.thinking.budget import set_outcome
from kiln.wire.thinking import ThinkingBudgetOutcome, ThinkingBudgetRecentRecord, ThinkingBudgetRecord

AnyRecord = ThinkingBudgetRecord | ThinkingBudgetRecentRecord
T = TypeVar("T", bound=msgspec.Struct)

LIMITING_SOURCES = frozenset({"server_default", "request", "suite", "run_override", "example", "unknown"})
LIFTING_SOURCES = frozenset(
    {
        "unlimited",
        "request_unlimited",
        "suite_unlimited",
        "run_override_unlimited",
        "example_unlimited",
        "unknown",
    }
)
_OUTCOME_FIELDS = ("triggered", "trigger", "closed", "thinking_tokens", "thinking_time_ms")


class InvalidRecord(ValueError):
    """A record that breaks the contract. `reason` names the rule, in the words of the vectors."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def read_record(raw: object) -> ThinkingBudgetRecord:
    """The record that decoded JSON stands for. The legacy form is made flat. Raises InvalidRecord."""
    if isinstance(raw, dict) and "outcome" in raw:
        raw = _flatten(raw)
    record = _convert(raw, ThinkingBudgetRecord)
    _check(record)
    return record


def read_recent_record(raw: object) -> ThinkingBudgetRecentRecord:
    """The same for a record of the server's recent history, which has no legacy form."""
    record = _convert(raw, ThinkingBudgetRecentRecord)
    _check(record)
    return record


def to_recent_record(
    budget: Budget, *, applied: bool | None, outcome: Outcome | None
) -> ThinkingBudgetRecentRecord:
    """The record of a recent request. `applied` is None only when the request failed before it was known."""
    record = ThinkingBudgetRecentRecord(
        configured=budget.configured,
        applied=UNSET if applied is None else applied,
        max_tokens=UNSET if budget.tokens.value is None else budget.tokens.value,
        max_time_ms=UNSET if budget.time_ms.value is None else budget.time_ms.value,
        tokens_source=budget.tokens.source,
        time_source=budget.time_ms.source,
    )
    if applied and outcome is not None:
        set_outcome(record, outcome)
    return record


def _flatten(raw: dict[str, Any]) -> dict[str, Any]:
    """The flat form of a legacy record."""
    flat = {name: value for name, value in raw.items() if name != "outcome"}
    mixed = [name for name in _OUTCOME_FIELDS if name in flat]
    if mixed:
        raise InvalidRecord("mixed_forms", f"a nested outcome stands beside {', '.join(mixed)}")
    if raw["outcome"] is None:
        return {**flat, "triggered": False}
    _convert(raw["outcome"], ThinkingBudgetOutcome)
    return {**flat, **raw["outcome"]}


def _convert(raw: object, kind: type[T]) -> T:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise InvalidRecord("shape", str(error)) from None


def _check(record: AnyRecord) -> None:
    """The rules between fields, each with its name."""
    finite = record.max_tokens is not UNSET or record.max_time_ms is not UNSET
    if record.configured is not finite:
        raise InvalidRecord("configured_mismatch", "configured says whether a limit is finite")
    _check_source("max_tokens", record.max_tokens, "tokens_source", record.tokens_source)
    _check_source("max_time_ms", record.max_time_ms, "time_source", record.time_source)
    if record.applied is True and not record.configured:
        raise InvalidRecord("applied_unconfigured", "a budget without a limit cannot apply")
    _check_outcome(record)


def _check_source(limit_name: str, limit: int | UnsetType, source_name: str, source: str) -> None:
    allowed = LIFTING_SOURCES if limit is UNSET else LIMITING_SOURCES
    if source not in allowed:
        state = "absent" if limit is UNSET else "finite"
        raise InvalidRecord("source_mismatch", f"{limit_name} is {state}, but {source_name} is {source}")


def _check_outcome(record: AnyRecord) -> None:
    counted = [record.closed, record.thinking_tokens, record.thinking_time_ms]
    seen = any(value is not UNSET for value in counted) or record.triggered is True
    if isinstance(record, ThinkingBudgetRecentRecord):
        seen = seen or record.triggered is not UNSET
        counted.append(record.triggered)
    if seen and UNSET in counted:
        raise InvalidRecord(
            "outcome_incomplete", "closed, thinking_tokens and thinking_time_ms come together, with triggered"
        )
    if seen and record.applied is not True:
        raise InvalidRecord("outcome_unapplied", "only a budget that applied has an outcome")
    if (record.triggered is True) != (record.trigger is not UNSET):
        raise InvalidRecord("trigger_mismatch", "trigger is there exactly when triggered")
