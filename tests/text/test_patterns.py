"""Patterns of tools' schemas: which are taken, and that none is costly to compile."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.core.errors import InvalidField
from kiln.text.tool_calls import ToolCall
from kiln.text.tool_calls.check import problem_of, refuse_bad_schema
from kiln.text.tool_calls.patterns import written_out


def schema_of(*patterns: str) -> dict[str, Any]:
    return {"properties": {f"p{at}": {"pattern": pattern} for at, pattern in enumerate(patterns)}}


@pytest.mark.parametrize(
    ("pattern", "fits", "does_not"),
    [
        (r"^\p{L}+$", "Åse", "a1"),
        (r"^\p{Lu}\p{Ll}*$", "Zürich", "zürich"),
        (r"^[0-9a-f]{64}$", "0a" * 32, "0a"),
        (r"^\d{4}-\d{2}$", "2024-01", "24-1"),
    ],
)
def test_a_pattern_is_taken_and_matched(pattern: str, fits: str, does_not: str) -> None:
    schema = schema_of(pattern)
    refuse_bad_schema(schema, "tools[0]")
    assert problem_of(ToolCall("call_1", "f", json.dumps({"p0": fits})), {"f": schema}) is None
    assert problem_of(ToolCall("call_1", "f", json.dumps({"p0": does_not})), {"f": schema}) is not None


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        (["("], "missing )"),
        ([r"\p{Foo}"], "unknown property"),
        (["(" * 3000], "recursion"),
        # Each would take seconds to minutes, and gigabytes.
        (["a{99999999}"], "10000 parts"),
        (["(?:(?:ab){1000}){1000}"], "10000 parts"),
        (["a{" + "9" * 4000 + "}"], "10000 parts"),
        (["[" * 5001], "5000 characters"),
        ([f"x{at}a{{9000}}" for at in range(12)], "100000 parts"),
    ],
)
def test_a_pattern_is_refused_with_its_reason(patterns: list[str], says: str) -> None:
    with pytest.raises(InvalidField, match=r"\$\.properties\.p\d+\.pattern") as caught:
        refuse_bad_schema(schema_of(*patterns), "tools[0].function.parameters")
    assert caught.value.param == "tools[0].function.parameters" and says in caught.value.message


def test_names_that_are_patterns_are_patterns() -> None:
    refuse_bad_schema({"patternProperties": {r"^\p{L}+$": {}}}, "tools[0]")
    with pytest.raises(InvalidField):
        refuse_bad_schema({"patternProperties": {"a{99999999}": {}}}, "tools[0]")


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [
        ("", 0),
        ("abc", 3),
        ("ab{3}", 4),
        ("(ab){3}c", 7),
        ("((a{2}b){3}c){4}", 40),
        ("[ab]{5}", 5),
        ("[]a{9}]{2}", 2),
        (r"\({3}", 3),
        ("a{0,9}", 1),
        ("(a|b{4}){2}", 12),
    ],
)
def test_repeats_are_counted(pattern: str, parts: int) -> None:
    assert written_out(pattern) == parts


@given(st.text("()[]{}12,ab\\^|?*+", max_size=30))
def test_counting_takes_any_text(pattern: str) -> None:
    assert written_out(pattern) >= 0
