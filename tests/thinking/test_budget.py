"""Resolution of limits, the record that reports them, and the metric's outcome names."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from kiln.core.budgets import Budget, Limit, Outcome, Trigger
from kiln.thinking.budget import (
    Layer,
    Override,
    applies,
    metric_outcome,
    resolve_budget,
    resolve_limit,
    to_outcome,
    to_record,
)

UNLIMITED = Limit(None, "unlimited")
NONE = Budget(UNLIMITED, UNLIMITED)
BOTH = Budget(Limit(64, "request"), Limit(3000, "server_default"))
TOKENS_ONLY = Budget(Limit(0, "request"), Limit(None, "request_unlimited"))

OVERRIDES = [UNSET, None, 0, 7]


def builtins(value: object) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(value)
    return found


# Resolution.


@pytest.mark.parametrize(
    ("default", "override", "value", "source"),
    [
        (None, UNSET, None, "unlimited"),
        (None, None, None, "{}_unlimited"),
        (None, 0, 0, "{}"),
        (None, 7, 7, "{}"),
        (512, UNSET, 512, "server_default"),
        (512, None, None, "{}_unlimited"),
        (512, 0, 0, "{}"),
        (512, 7, 7, "{}"),
        (0, UNSET, 0, "server_default"),
        (0, None, None, "{}_unlimited"),
        (0, 7, 7, "{}"),
    ],
)
@pytest.mark.parametrize("layer", list(Layer))
def test_one_layer_over_the_default(
    layer: Layer, default: int | None, override: Override, value: int | None, source: str
) -> None:
    assert resolve_limit(default, [(layer, override)]) == Limit(value, source.format(layer.value))


def test_no_layers() -> None:
    assert resolve_limit(None) == UNLIMITED
    assert resolve_limit(0) == Limit(0, "server_default")


def test_layers_from_the_weakest_to_the_strongest() -> None:
    assert [layer.value for layer in Layer] == ["suite", "example", "run_override", "request"]


@given(
    st.none() | st.integers(0, 9),
    st.fixed_dictionaries({layer: st.sampled_from(OVERRIDES) for layer in Layer}),
    st.permutations(list(Layer)),
)
def test_the_strongest_layer_that_speaks_decides(
    default: int | None, stated: dict[Layer, Override], order: list[Layer]
) -> None:
    expected = Limit(default, "unlimited" if default is None else "server_default")
    for layer in Layer:
        override = stated[layer]
        if override is None:
            expected = Limit(None, layer.value + "_unlimited")
        elif override is not UNSET:
            assert isinstance(override, int)
            expected = Limit(override, layer.value)
    assert resolve_limit(default, [(layer, stated[layer]) for layer in order]) == expected


@given(*[st.none() | st.integers(0, 9)] * 2, *[st.sampled_from(OVERRIDES)] * 2)
def test_the_dimensions_are_independent(
    default_tokens: int | None, default_ms: int | None, tokens: Override, ms: Override
) -> None:
    both = resolve_budget(
        default_tokens=default_tokens,
        default_time_ms=default_ms,
        request_tokens=tokens,
        request_time_ms=ms,
    )
    assert both.tokens == resolve_limit(default_tokens, [(Layer.REQUEST, tokens)])
    assert both.time_ms == resolve_limit(default_ms, [(Layer.REQUEST, ms)])
    assert both.configured is (both.tokens.value is not None or both.time_ms.value is not None)


def test_budget_zero_keeps_the_default_of_the_other_dimension() -> None:
    budget = resolve_budget(default_tokens=512, default_time_ms=5000, request_tokens=0)
    assert budget == Budget(Limit(0, "request"), Limit(5000, "server_default"))


@pytest.mark.parametrize(
    ("budget", "in_reasoning", "max_tokens", "expected"),
    [
        (BOTH, True, 1, True),
        (TOKENS_ONLY, True, 1, True),
        (Budget(UNLIMITED, Limit(0, "request")), True, 1, True),
        (NONE, True, 9, False),
        (BOTH, False, 9, False),
        (BOTH, True, 0, False),
    ],
)
def test_when_a_budget_applies(budget: Budget, in_reasoning: bool, max_tokens: int, expected: bool) -> None:
    assert applies(budget, starts_in_reasoning=in_reasoning, max_tokens=max_tokens) is expected


# The record, row by row.


@pytest.mark.parametrize(
    ("budget", "applied", "outcome", "record"),
    [
        pytest.param(
            NONE,
            False,
            None,
            {
                "configured": False,
                "applied": False,
                "tokens_source": "unlimited",
                "time_source": "unlimited",
                "triggered": False,
            },
            id="no limit",
        ),
        pytest.param(
            Budget(Limit(None, "request_unlimited"), UNLIMITED),
            False,
            None,
            {
                "configured": False,
                "applied": False,
                "tokens_source": "request_unlimited",
                "time_source": "unlimited",
                "triggered": False,
            },
            id="no limit, by request",
        ),
        pytest.param(
            BOTH,
            False,
            None,
            {
                "configured": True,
                "applied": False,
                "max_tokens": 64,
                "max_time_ms": 3000,
                "tokens_source": "request",
                "time_source": "server_default",
                "triggered": False,
            },
            id="inert",
        ),
        pytest.param(
            BOTH,
            True,
            Outcome(None, True, 12, 80),
            {
                "configured": True,
                "applied": True,
                "max_tokens": 64,
                "max_time_ms": 3000,
                "tokens_source": "request",
                "time_source": "server_default",
                "triggered": False,
                "closed": True,
                "thinking_tokens": 12,
                "thinking_time_ms": 80,
            },
            id="natural close",
        ),
        pytest.param(
            TOKENS_ONLY,
            True,
            Outcome(Trigger.TOKENS, True, 0, 0),
            {
                "configured": True,
                "applied": True,
                "max_tokens": 0,
                "tokens_source": "request",
                "time_source": "request_unlimited",
                "triggered": True,
                "trigger": "tokens",
                "closed": True,
                "thinking_tokens": 0,
                "thinking_time_ms": 0,
            },
            id="forced, budget 0",
        ),
        pytest.param(
            BOTH,
            True,
            Outcome(Trigger.TIME, False, 9, 3001),
            {
                "configured": True,
                "applied": True,
                "max_tokens": 64,
                "max_time_ms": 3000,
                "tokens_source": "request",
                "time_source": "server_default",
                "triggered": True,
                "trigger": "time",
                "closed": False,
                "thinking_tokens": 9,
                "thinking_time_ms": 3001,
            },
            id="forced, ended before the whole close",
        ),
        pytest.param(
            BOTH,
            True,
            Outcome(None, False, 5, 7),
            {
                "configured": True,
                "applied": True,
                "max_tokens": 64,
                "max_time_ms": 3000,
                "tokens_source": "request",
                "time_source": "server_default",
                "triggered": False,
                "closed": False,
                "thinking_tokens": 5,
                "thinking_time_ms": 7,
            },
            id="ended unclosed",
        ),
        pytest.param(
            Budget(UNLIMITED, Limit(0, "suite")),
            True,
            Outcome(None, True, 5, 7, interrupted=True),
            {
                "configured": True,
                "applied": True,
                "max_time_ms": 0,
                "tokens_source": "unlimited",
                "time_source": "suite",
                "triggered": False,
                "closed": True,
                "thinking_tokens": 5,
                "thinking_time_ms": 7,
            },
            id="skipped",
        ),
    ],
)
def test_the_record(budget: Budget, applied: bool, outcome: Outcome | None, record: dict[str, Any]) -> None:
    assert builtins(to_record(budget, applied=applied, outcome=outcome)) == record


def test_the_outcome_object() -> None:
    assert builtins(to_outcome(Outcome(Trigger.MAX_TOKENS, True, 9, 70))) == {
        "triggered": True,
        "trigger": "max_tokens",
        "closed": True,
        "thinking_tokens": 9,
        "thinking_time_ms": 70,
    }
    assert builtins(to_outcome(Outcome(None, False, 0, 0, interrupted=True))) == {
        "triggered": False,
        "closed": False,
        "thinking_tokens": 0,
        "thinking_time_ms": 0,
    }


limits = st.builds(
    resolve_limit,
    st.none() | st.integers(0, 9),
    st.lists(st.tuples(st.sampled_from(list(Layer)), st.sampled_from(OVERRIDES)), max_size=4),
)
outcomes = st.builds(
    Outcome,
    trigger=st.none() | st.sampled_from(list(Trigger)),
    closed=st.booleans(),
    thinking_tokens=st.integers(0, 99),
    thinking_time_ms=st.integers(0, 99),
)

FINITE_SOURCES = {"server_default", "request", "suite", "run_override", "example", "unknown"}
ALWAYS = {"configured", "applied", "tokens_source", "time_source", "triggered"}
OUTCOME = {"closed", "thinking_tokens", "thinking_time_ms"}


@given(limits, limits, st.booleans(), st.integers(0, 2), outcomes)
def test_invariants_of_the_record(
    tokens: Limit, time_ms: Limit, in_reasoning: bool, max_tokens: int, outcome: Outcome
) -> None:
    budget = Budget(tokens, time_ms)
    applied = applies(budget, starts_in_reasoning=in_reasoning, max_tokens=max_tokens)
    record = builtins(to_record(budget, applied=applied, outcome=outcome if applied else None))
    assert None not in record.values()
    assert record["configured"] is ("max_tokens" in record or "max_time_ms" in record)
    for limit, source in (("max_tokens", "tokens_source"), ("max_time_ms", "time_source")):
        if limit in record:
            assert record[source] in FINITE_SOURCES
        else:
            assert record[source] == "unlimited" or record[source].endswith("_unlimited")
    assert ("trigger" in record) is record["triggered"]
    assert record["configured"] or not record["applied"]
    assert (record.keys() >= OUTCOME) is record["applied"]
    optional = {"max_tokens", "max_time_ms", "trigger"}
    assert record.keys() - optional == ALWAYS | (OUTCOME if applied else set())
    if applied:
        assert builtins(to_outcome(outcome)).items() <= record.items()


# The metric's names.

CLOSED = Outcome(None, True, 3, 4)


@pytest.mark.parametrize(
    ("budget", "applied", "outcome", "finished", "name"),
    [
        (NONE, False, None, True, "unconfigured"),
        (NONE, False, CLOSED, True, "unconfigured"),
        (BOTH, False, None, True, "inert"),
        (BOTH, False, None, False, "inert"),
        (BOTH, True, CLOSED, True, "natural_close"),
        (BOTH, True, CLOSED, False, "natural_close"),
        (BOTH, True, Outcome(Trigger.TOKENS, True, 3, 4), True, "tokens"),
        (BOTH, True, Outcome(Trigger.TIME, True, 3, 4), True, "time"),
        (BOTH, True, Outcome(Trigger.MAX_TOKENS, True, 3, 4), True, "max_tokens"),
        (BOTH, True, Outcome(Trigger.TOKENS, False, 3, 4), False, "tokens"),
        (BOTH, True, Outcome(None, False, 3, 4), True, "unclosed"),
        (BOTH, True, Outcome(None, False, 3, 4), False, "unresolved"),
        (BOTH, True, None, False, "unresolved"),
        (BOTH, True, Outcome(None, True, 3, 4, interrupted=True), True, "interrupted"),
        (BOTH, True, Outcome(None, False, 3, 4, interrupted=True), False, "interrupted"),
        (NONE, False, Outcome(None, True, 3, 4, interrupted=True), True, "interrupted"),
    ],
)
def test_metric_outcome(
    budget: Budget, applied: bool, outcome: Outcome | None, finished: bool, name: str
) -> None:
    assert metric_outcome(budget, applied=applied, outcome=outcome, finished=finished) == name


NAMES = {
    "unconfigured",
    "inert",
    "natural_close",
    "tokens",
    "time",
    "max_tokens",
    "unclosed",
    "interrupted",
    "unresolved",
}


@given(st.sampled_from([NONE, BOTH, TOKENS_ONLY]), st.booleans(), st.none() | outcomes, st.booleans())
def test_metric_outcome_has_no_tenth_name(
    budget: Budget, applied: bool, outcome: Outcome | None, finished: bool
) -> None:
    assert metric_outcome(budget, applied=applied, outcome=outcome, finished=finished) in NAMES
