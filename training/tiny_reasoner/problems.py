"""Sums of single digits: drawing, the held-out split, and reading answers. No torch.

Held-out problems are chosen by a hash of the problem, so no script has to remember a list.
"""

import json
import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

HELD_OUT_PART = 8  # one problem in eight is never trained on


@dataclass(frozen=True)
class Problem:
    """Signed single-digit terms whose running total stays within 0..99."""

    terms: tuple[int, ...]

    @property
    def text(self) -> str:
        """The sum as it is written, for example `3+8-2`."""
        return "".join(f"{term:+d}" for term in self.terms)[1:]

    @property
    def answer(self) -> int:
        return sum(self.terms)

    @property
    def thought(self) -> str:
        """One line a step: `3+8=11`, then `11-2=9`."""
        total, lines = self.terms[0], []
        for term in self.terms[1:]:
            lines.append(f"{total}{term:+d}={total + term}\n")
            total += term
        return "".join(lines)

    @property
    def held_out(self) -> bool:
        return zlib.crc32(self.text.encode()) % HELD_OUT_PART == 0


def draw_problem(
    rng: random.Random, terms: int, *, held_out: bool = False, repeats: bool = False
) -> Problem:
    """A random problem of the wanted length and split.

    Signed terms are unique (unless `repeats`), so that the place to go on from is always clear.
    """
    while True:
        first = rng.randint(1, 9)
        drawn, total = [first], first
        while len(drawn) < terms:
            choices = [
                term
                for term in range(-9, 10)
                if term and 0 <= total + term <= 99 and (repeats or term not in drawn)
            ]
            if not choices:
                break
            term = rng.choice(choices)
            drawn.append(term)
            total += term
        problem = Problem(tuple(drawn))
        if len(drawn) == terms and problem.held_out == held_out:
            return problem


def draw_held_out(
    seed: int, each: int, lengths: Sequence[int] = tuple(range(2, 13))
) -> list[Problem]:
    """Distinct held-out problems, `each` of every length where that many exist."""
    rng = random.Random(seed)
    problems: list[Problem] = []
    for length in lengths:
        seen: set[Problem] = set()
        for _ in range(each * 40):
            seen.add(draw_problem(rng, length, held_out=True))
            if len(seen) == each:
                break
        problems += sorted(seen, key=lambda problem: problem.text)
    rng.shuffle(problems)
    return problems


_ANSWER = re.compile(r"(?:answer is|It is) (-?\d+)")


def parse_answer(text: str) -> int | None:
    """The number a reply states, in a sentence or as JSON; None if it states none."""
    visible = text.rsplit("</think>", 1)[-1].strip()
    try:
        value = json.loads(visible)
    except ValueError:
        found = _ANSWER.search(visible)
        return int(found.group(1)) if found else None
    number = value.get("answer") if isinstance(value, dict) else None
    return number if type(number) is int else None


def json_form(text: str) -> bool:
    """True if the visible text is exactly `{"answer": <integer>}`."""
    try:
        value = json.loads(text.rsplit("</think>", 1)[-1])
    except ValueError:
        return False
    return isinstance(value, dict) and list(value) == ["answer"] and type(value["answer"]) is int


_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


def parse_calls(text: str) -> list[dict[str, Any]]:
    """The tool calls of a reply; an unreadable one becomes an empty object."""
    calls = []
    for body in _CALL.findall(text.rsplit("</think>", 1)[-1]):
        try:
            calls.append(json.loads(body))
        except ValueError:
            calls.append({})
    return calls
