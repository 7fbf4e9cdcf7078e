"""The prefix cache: KV that is computed already, found by the longest common prefix of token ids.

Every slot is an entry: running sequences, and retained ones whose request has ended. Entries are
few (at most a few hundred), so a scan with an early way out beats a tree. A prefix is reused only
within one `scope` (model and adapter revision), and an exact request reuses only tokens that were
computed exactly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kiln.engine.schedule.kv import common_prefix

# Shorter prefixes are cheaper to compute again than to wait for or to keep.
WORTH_SHARING = 16


@dataclass(slots=True)
class Entry:
    """The tokens of one slot. `ids` may run ahead of `computed` while the slot is prefilling.

    The first `exact` computed tokens were computed exactly. `busy` while a request runs in the slot,
    `exactly` if that request computes exactly. `covered` if a request that runs began with all of it.
    """

    slot: int
    ids: NDArray[np.int32]
    scope: str = ""
    computed: int = 0
    exact: int = 0
    busy: bool = True
    exactly: bool = False
    covered: bool = False
    used: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """Where a prompt's prefix can be had: `length` tokens of `slot` now, `coming` tokens soon."""

    slot: int | None
    length: int
    coming: int


class PrefixCache:
    """Entries by slot, and the clock of their use."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._clock = 0

    def get(self, slot: int) -> Entry | None:
        return self._entries.get(slot)

    def put(self, entry: Entry) -> None:
        self._entries[entry.slot] = entry
        self.touch(entry.slot)

    def touch(self, slot: int) -> None:
        self._clock += 1
        self._entries[slot].used = self._clock

    def drop(self, slot: int) -> None:
        self._entries.pop(slot, None)

    def forget_exactness(self) -> None:
        """No entry can be continued exactly any more: cells have been freed below it."""
        for entry in self._entries.values():
            entry.exact = 0

    def retained(self) -> list[Entry]:
        """Entries that no request runs in, the least recently used first."""
        return sorted((e for e in self._entries.values() if not e.busy), key=lambda e: e.used)

    def match(
        self,
        ids: NDArray[np.int32],
        *,
        scope: str,
        exact: bool,
        without: frozenset[int] = frozenset(),
    ) -> Match:
        """The longest prefix of `ids` that is computed, and the longest that a running prompt will have.

        Slots in `without` are not considered. At least one token of `ids` is always left to compute,
        since its logits are needed.
        """
        best, slot, coming = 0, None, 0
        for entry in self._entries.values():
            if entry.scope != scope or entry.slot in without:
                continue
            shared = min(common_prefix(ids, entry.ids), len(ids) - 1)
            usable = min(shared, entry.exact if exact else entry.computed)
            if usable > best:
                best, slot = usable, entry.slot
            if entry.busy and entry.computed < len(entry.ids) and (entry.exactly or not exact):
                coming = max(coming, shared)
        if best < WORTH_SHARING:
            best, slot = 0, None
        return Match(slot, best, coming)

    def covered_by(self, entry: Entry) -> Iterable[Entry]:
        """Retained entries that `entry` makes superfluous: it holds all they hold, as exactly."""
        for other in self._entries.values():
            if other is entry or other.busy or other.scope != entry.scope:
                continue
            if other.computed <= entry.computed and other.exact <= entry.exact:
                if common_prefix(other.ids[: other.computed], entry.ids) == other.computed:
                    yield other
