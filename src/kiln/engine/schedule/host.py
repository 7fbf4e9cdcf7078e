"""Prefixes in the host's memory: the KV of ended requests that was too much to keep in the cache.

Attention walks over every cell in use, so few tokens are retained in the cache itself. What is dropped
from there can be copied out and later copied back into fresh cells, which is a thousand times faster than
computing it again. Copies hold the same bits, in the order of their cells, so exact ones stay exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kiln.engine.schedule.kv import common_prefix
from kiln.engine.schedule.prefix import WORTH_SHARING, Entry

# Every prefix is found by its first tokens, as many as are worth sharing at all.
HEAD = WORTH_SHARING
# Copying back so many tokens costs about as much as computing one.
COPIES_A_TOKEN = 64
# Prefixes kept at most, whatever their size: all with the same beginning are compared one by one.
MOST_SAVED = 512


@dataclass(frozen=True, slots=True, eq=False)
class SavedPrefix:
    """The KV of `ids` within a scope, as the model's runner gave it. The first `exact` are exact."""

    ids: NDArray[np.int32]
    scope: str
    exact: int
    data: NDArray[np.uint8]

    def agrees(self, ids: NDArray[np.int32], *, at: int) -> bool:
        """Whether it may share more than `at` tokens with a prompt: hundreds begin with one system prompt,
        so most can be told from the best without comparing all that they have in common."""
        return at < len(self.ids) and bool(self.ids[at] == ids[at])

    def usable(self, ids: NDArray[np.int32], *, exact: bool) -> int:
        """How many tokens a prompt can take from it. At least one is always left to compute.

        Zero where copying it, which is all or nothing, would cost more than it saves.
        """
        shared = min(common_prefix(ids, self.ids), len(ids) - 1)
        shared = min(shared, self.exact) if exact else shared
        return shared if shared * COPIES_A_TOKEN >= len(self.ids) else 0


class HostPrefixes:
    """Saved prefixes of `most_bytes` in all, the least recently used dropped first.

    `save(slot, most_bytes)` gives the KV of a slot, or None if it is larger.
    """

    def __init__(self, most_bytes: int, save: Callable[[int, int], NDArray[np.uint8] | None]) -> None:
        self._most_bytes = most_bytes
        self._save = save
        self._bytes = 0
        # The keys of a dictionary are in the order of use; the buckets hold the same objects.
        self._used: dict[SavedPrefix, None] = {}
        self._buckets: dict[tuple[str, bytes], list[SavedPrefix]] = {}

    def __len__(self) -> int:
        return len(self._used)

    def keep(self, entry: Entry) -> bool:
        """Save what a slot has computed, if it is worth it and not there yet. False if it is too large."""
        if entry.computed < HEAD:
            return True
        ids = entry.ids[: entry.computed]
        for other in list(self._alike(ids, entry.scope)):
            shared = common_prefix(ids, other.ids)
            if shared == len(ids) and other.exact >= entry.exact:
                self.touch(other)
                return True
        data = self._save(entry.slot, self._most_bytes)
        if data is None:
            return False
        for other in list(self._alike(ids, entry.scope)):
            if common_prefix(ids, other.ids) == len(other.ids) and other.exact <= entry.exact:
                self._forget(other)
        saved = SavedPrefix(ids.copy(), entry.scope, entry.exact, data)
        self._used[saved] = None
        self._buckets.setdefault(_key(ids, entry.scope), []).append(saved)
        self._bytes += saved.data.nbytes
        while self._bytes > self._most_bytes or len(self._used) > MOST_SAVED:
            self._forget(next(iter(self._used)))
        return True

    def match(self, ids: NDArray[np.int32], *, scope: str, exact: bool) -> tuple[SavedPrefix | None, int]:
        """The saved prefix that a prompt can take most tokens from, and how many."""
        best, length = None, 0
        for saved in self._alike(ids, scope):
            if best is not None and len(saved.ids) >= len(best.ids) and not saved.agrees(ids, at=length):
                continue
            usable = saved.usable(ids, exact=exact)
            if usable > length or (usable == length and best is not None and len(saved.ids) < len(best.ids)):
                best, length = saved, usable
        return (best, length) if length >= HEAD else (None, 0)

    def touch(self, saved: SavedPrefix) -> None:
        if saved in self._used:
            del self._used[saved]
            self._used[saved] = None

    def forget(self, saved: SavedPrefix) -> None:
        if saved in self._used:
            self._forget(saved)

    def _alike(self, ids: NDArray[np.int32], scope: str) -> list[SavedPrefix]:
        return self._buckets.get(_key(ids, scope), []) if len(ids) >= HEAD else []

    def _forget(self, saved: SavedPrefix) -> None:
        key = _key(saved.ids, saved.scope)
        self._buckets[key].remove(saved)
        if not self._buckets[key]:
            del self._buckets[key]
        del self._used[saved]
        self._bytes -= saved.data.nbytes


def _key(ids: NDArray[np.int32], scope: str) -> tuple[str, bytes]:
    return scope, ids[:HEAD].tobytes()
