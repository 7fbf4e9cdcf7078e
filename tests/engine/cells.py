"""A pool of KV cells that gives them out as llama.cpp's unified cache does.

The search goes on from a head that moves to the lowest freed cell, and starts over where the head is
far ahead of what is used: so a sequence's cells lie in the order of its positions only as long as
nobody frees any.
"""

from __future__ import annotations

from collections.abc import Iterable


class CellPool:
    def __init__(self, size: int) -> None:
        self._taken = [False] * size
        self._head = 0

    @property
    def taken(self) -> int:
        return sum(self._taken)

    def take(self, count: int) -> list[int]:
        """`count` cells for one call, in the order of its rows."""
        if self._head > self.taken + 2 * count:
            self._head = 0
        size = len(self._taken)
        order = [*range(self._head, size), *range(self._head)]
        cells = [cell for cell in order if not self._taken[cell]][:count]
        assert len(cells) == count, "more cells than there are"
        for cell in cells:
            self._taken[cell] = True
        self._head = cells[-1] + 1
        return cells

    def free(self, cells: Iterable[int]) -> None:
        freed = set(cells)
        for cell in freed:
            self._taken[cell] = False
        if freed:
            self._head = min(self._head, *freed)
