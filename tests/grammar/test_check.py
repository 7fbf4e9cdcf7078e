"""Grammars are tried in a child process: what takes too long or too much there is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kiln.chat.structured.check import BOUNDS, NOTHING_SATISFIES, TOO_LONG, GrammarCheck
from kiln.core.errors import EngineFailed, GrammarFailed
from kiln.engine.sampling.grammar import GrammarCompiler
from kiln.text.lark import json_of

from .letters import CALL, Letters
from .test_engine import AFTER_NEWLINES, NUMBER, OBJECT


@pytest.fixture(scope="module")
def check() -> Iterator[GrammarCheck]:
    check = GrammarCheck(Letters())
    yield check
    check.close()


def holding_together(count: int) -> dict[str, Any]:
    """Intersecting these takes time and memory that double with each, and no fuel of llguidance."""
    return {"allOf": [{"type": "string", "pattern": f".*x{at}.*"} for at in range(count)]}


@pytest.mark.parametrize(
    "schema",
    [holding_together(25), holding_together(40), {"type": "integer", "multipleOf": 999_983}],
    ids=["25 patterns", "40 patterns", "multiples"],
)
def test_what_takes_minutes_is_given_up(check: GrammarCheck, schema: dict[str, Any]) -> None:
    assert check.problem(f"start: {json_of(schema)}") == TOO_LONG
    assert check.problem(NUMBER) is None


def test_what_takes_gigabytes_is_given_up() -> None:
    bounds = replace(BOUNDS, cpu_seconds=120.0, wall_seconds=120.0, memory_bytes=2**27)
    check = GrammarCheck(Letters(), bounds)
    multiples = {"type": "integer", "multipleOf": 999_983}
    assert check.problem(f"start: {json_of(multiples)}") == "it takes too much memory to compile"
    assert check.problem(NUMBER) is None
    check.close()


@pytest.mark.parametrize("letters", [Letters(), Letters(eos_ids=())])
def test_it_agrees_with_the_engine_on_what_compiles(letters: Letters) -> None:
    compiler, check = GrammarCompiler(letters), GrammarCheck(letters)
    for grammar in (OBJECT, NUMBER, AFTER_NEWLINES, f'start: <[{CALL}]> "x" <call>'):
        assert compiler.state(grammar).allowed() is not None
        assert check.problem(grammar) is None
    for wrong in ("start: nothing_of_this_name", "start: <[9999]>", 'start: %json {"type": "strin"}'):
        with pytest.raises(GrammarFailed):
            compiler.state(wrong).allowed()
        with pytest.raises(GrammarFailed):
            check.check(wrong)
    assert check.problem("start: x\nx: x") == NOTHING_SATISFIES
    check.close()


def test_what_was_found_is_known_without_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    check = GrammarCheck(Letters(), kept=2)
    assert check.problem(NUMBER) is None
    wrong = check.problem("start: nothing_of_this_name")
    asked: list[bytes] = []

    def run(payload: bytes) -> bytes:
        asked.append(payload)
        return b"null"

    monkeypatch.setattr(check._children, "run", run)
    assert check.problem("start: nothing_of_this_name") == wrong is not None
    assert check.problem(NUMBER) is None and asked == []
    check.problem(OBJECT)
    assert check.problem("start: nothing_of_this_name") is None and len(asked) == 2, "the oldest was dropped"
    check.close()


def test_a_server_that_can_start_no_process_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(EngineFailed):
        GrammarCheck(Letters()).check(NUMBER)


def test_half_a_character_is_refused(check: GrammarCheck) -> None:
    assert "surrogate" in str(check.problem('start: "\ud800"'))


def test_more_branches_at_one_place_than_can_be_followed_are_refused(check: GrammarCheck) -> None:
    branches = {"anyOf": [{"type": "array", "items": {"const": at}} for at in range(900)]}
    problem = check.problem(f"start: {json_of(branches)}")
    assert problem is not None and problem.startswith("it cannot be followed")
    assert len(problem) < 500 and json.dumps(problem)
