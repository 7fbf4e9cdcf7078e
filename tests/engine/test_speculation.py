"""What the drafter proposes: the continuation of the latest, longest match, no more than it may."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.engine.sampling.speculation import LONGEST_MATCH, SHORTEST_MATCH, Drafter


def drafter(tokens: Sequence[int], *, most: int = 8) -> Drafter:
    made = Drafter(tokens, most=most)
    for _ in range(4):
        made.judge(1, 1)
    return made


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], [4, 5, 1, 2]),
        ([1, 2, 3, 4, 9, 1, 2, 3, 5, 8, 1, 2, 3], [5, 8, 1, 2]),
        # The longer match wins over the later one.
        ([7, 1, 2, 3, 4, 9, 1, 2, 3, 5, 8, 7, 1, 2, 3], [4, 9, 1, 2]),
        # Two equal tokens are no match yet.
        ([9, 2, 3, 4, 5, 1, 2, 3], []),
        # A text that repeats goes on repeating.
        ([1, 2, 1, 2, 1, 2], [1, 2, 1, 2]),
        ([6, 6, 6, 6], [6, 6, 6, 6]),
        ([6], []),
        ([6, 6], []),
    ],
)
def test_what_is_proposed(tokens: list[int], draft: list[int]) -> None:
    assert drafter(tokens).propose(4) == draft


def test_tokens_are_recorded_beyond_the_first_buffer() -> None:
    made = drafter([1, 2, 3])
    for token in (4, 5, 6, 7, 8, 9, 1, 2, 3):
        made.record(token)
    assert made.propose(3) == [4, 5, 6]


def test_drafts_grow_with_success_and_shrink_with_failure() -> None:
    made = Drafter([1, 2, 3, 4] * 4, most=6)
    assert len(made.propose(32)) == 2
    made.judge(2, 2)
    assert len(made.propose(32)) == 4
    made.judge(4, 4)
    assert len(made.propose(32)) == 6
    made.judge(6, 3)
    assert len(made.propose(32)) == 3
    made.judge(3, 0)
    assert len(made.propose(32)) == 1
    assert made.propose(0) == [] == made.propose(-1)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 12))
def test_a_draft_follows_an_earlier_match_as_long_as_any(tokens: list[int], most: int) -> None:
    draft = drafter(tokens, most=16).propose(most)

    def length(end: int) -> int:
        """How many tokens before `end` equal the last ones."""
        size = 0
        while size < min(end, LONGEST_MATCH) and tokens[end - 1 - size] == tokens[-1 - size]:
            size += 1
        return size

    matches = [(length(end), end) for end in range(1, len(tokens))]
    longest = max(matches, default=(0, 0))
    if longest[0] < SHORTEST_MATCH:
        assert draft == []
    else:
        end = longest[1]
        assert draft == [tokens[end + i % (len(tokens) - end)] for i in range(most)]
