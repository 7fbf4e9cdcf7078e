"""Prompt-lookup speculation: what followed the same tokens before is likely to follow them again.

A sequence's last tokens are looked up in its own prompt and output; the tokens behind the latest, longest
match are the draft. The model computes all of them in one call, and each is kept only if the sequence's
own sampler picks it, so a draft changes how many calls an answer takes and nothing else. Saxena, "Prompt
lookup decoding", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# A match of fewer tokens says little; one of more says no more.
SHORTEST_MATCH = 3
LONGEST_MATCH = 8


class Drafter:
    """Drafts for one sequence. Drafts grow while they are right and shrink as soon as they are wrong."""

    __slots__ = ("_length", "_most", "_tokens", "_trust")

    def __init__(self, prompt_ids: Sequence[int], *, most: int) -> None:
        """`most` tokens in a draft at most."""
        self._length = len(prompt_ids)
        self._tokens = np.empty(2 * self._length, np.int32)
        self._tokens[: self._length] = prompt_ids
        self._most = most
        self._trust = min(2, most)

    def record(self, token: int) -> None:
        """Note the token that was placed, sampled or forced."""
        if self._length == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.empty_like(self._tokens)))
        self._tokens[self._length] = token
        self._length += 1

    def judge(self, drafted: int, accepted: int) -> None:
        """Learn from a verified draft."""
        self._trust = min(2 * self._trust, self._most) if accepted == drafted else max(1, accepted)

    def propose(self, most: int) -> list[int]:
        """What may follow, at most `most` tokens; nothing where the last tokens are new. Changes nothing."""
        size = min(most, self._trust)
        start = self._lookup() if size > 0 else None
        if start is None:
            return []
        known = self._tokens[start : min(start + size, self._length)].tolist()
        # A match that ends near the end of the text repeats itself.
        return [known[i % len(known)] for i in range(size)]

    def _lookup(self) -> int | None:
        """Behind the latest of the longest matches of the last tokens; None if there is none."""
        tokens, last = self._tokens, self._length - 1
        ends: NDArray[np.intp] = np.flatnonzero(tokens[:last] == tokens[last])
        for back in range(1, LONGEST_MATCH):
            longer = ends[ends >= back]
            longer = longer[tokens[longer - back] == tokens[last - back]] if last >= back else longer[:0]
            if not len(longer):
                if back < SHORTEST_MATCH:
                    return None
                break
            ends = longer
        return int(ends[-1]) + 1 if len(ends) else None
