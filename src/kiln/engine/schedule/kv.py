"""Book-keeping of the unified KV cache: which cells each slot holds, which are shared, which are dead.

llama.cpp's unified cache is one pool of cells; copying a prefix from one sequence to another makes
both own the same cells. The ledger mirrors that with virtual cell numbers and reference counts, so
that the scheduler knows exactly how many cells are free without asking the native side.

The cache is used like a log. A cell that nobody holds any more is dead, not free: as long as no cell
is freed, every sequence's cells lie in the order of its positions, and attention adds its terms in
the same order whoever else comes and goes. That is what makes exact requests exact. `collect` frees
the dead cells; sequences that must stay exact have to be computed again after it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class KVLedger:
    """Cells of `slots` sequences over a pool of `cells`. Every operation is O(tokens touched)."""

    def __init__(self, *, slots: int, cells: int) -> None:
        self.cells = cells
        self._references = np.zeros(cells, np.int32)
        self._spare = list(range(cells - 1, -1, -1))
        self._dead: list[int] = []
        self._held: list[list[int]] = [[] for _ in range(slots)]

    @property
    def free(self) -> int:
        """Cells that can be taken at once."""
        return len(self._spare)

    @property
    def dead(self) -> int:
        """Cells that `collect` would free."""
        return len(self._dead)

    def length(self, slot: int) -> int:
        """Tokens that a slot holds, shared ones included."""
        return len(self._held[slot])

    def extend(self, slot: int, count: int) -> None:
        """Give a slot `count` more cells. ValueError if the pool has fewer: the scheduler must not ask."""
        if count > len(self._spare):
            raise ValueError(f"{count} cells asked, {len(self._spare)} free")
        if count == 0:
            return
        taken = self._spare[-count:]
        del self._spare[-count:]
        self._references[taken] = 1
        self._held[slot].extend(taken)

    def share(self, source: int, target: int, length: int) -> None:
        """Let an empty slot hold the first `length` cells of another too."""
        if self._held[target]:
            raise ValueError("the target slot is not empty")
        shared = self._held[source][:length]
        if len(shared) != length:
            raise ValueError(f"the source holds {len(shared)} tokens, not {length}")
        self._references[shared] += 1
        self._held[target] = shared

    def trim(self, slot: int, length: int) -> None:
        """Take all cells but the first `length` from a slot; those that nobody else holds are dead."""
        held = self._held[slot]
        cut = held[length:]
        del held[length:]
        self._references[cut] -= 1
        self._dead.extend(cell for cell in cut if self._references[cell] == 0)

    def release(self, slot: int) -> None:
        """Take all cells from a slot; those that nobody else holds are dead."""
        self.trim(slot, 0)

    def collect(self) -> None:
        """Free the dead cells. From now on cells are taken out of the order of positions."""
        self._spare.extend(self._dead)
        self._dead = []

    def write_off(self, count: int) -> None:
        """Never use `count` free cells again: the native cache turned out to have fewer."""
        del self._spare[:count]
        self.cells -= count

    def would_free(self, slots: Sequence[int]) -> int:
        """Cells that would be dead if all these slots were released together."""
        held = [cell for slot in slots for cell in self._held[slot]]
        if not held:
            return 0
        cells, counts = np.unique(np.asarray(held, np.int64), return_counts=True)
        return int(np.count_nonzero(self._references[cells] == counts))

    def check(self) -> None:
        """AssertionError unless references, holdings and the free list agree."""
        counted = np.zeros(len(self._references), np.int32)
        for held in self._held:
            assert len(set(held)) == len(held), "a slot holds a cell twice"
            counted[held] += 1
        assert (counted == self._references).all(), "reference counts disagree with the holdings"
        unused = self._spare + self._dead
        assert len(set(unused)) == len(unused), "a cell is free twice"
        assert (counted[unused] == 0).all(), "a cell is free and held"
        assert len(unused) + np.count_nonzero(counted) == self.cells, "a cell is lost"


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Length of the longest common prefix of two id arrays."""
    size = min(len(a), len(b))
    # Most pairs differ at once: do not compare long prompts to find that out.
    head = min(size, 32)
    unequal = np.flatnonzero(a[:head] != b[:head])
    if len(unequal):
        return int(unequal[0])
    unequal = np.flatnonzero(a[head:size] != b[head:size])
    return head + int(unequal[0]) if len(unequal) else size
