"""Admission: which waiting sequences get a slot, and which prefix they start from.

Places are given in the order of the line whatever the adapters, so that no group of them can keep
another out; a sequence whose group does not have the turn is admitted without a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kiln.engine.ports import AdapterSet
from kiln.engine.schedule.host import HostPrefixes, SavedPrefix
from kiln.engine.schedule.kv import KVLedger, common_prefix
from kiln.engine.schedule.plan import Admission, Limits, Step
from kiln.engine.schedule.prefix import WORTH_SHARING, PrefixCache
from kiln.engine.schedule.waiting import WaitingLine
from kiln.engine.sequence import Sequence


@dataclass(slots=True)
class Draft:
    """A step in the making: the group that computes, what is left of cells and prompt budget, the chunks.

    `wanted` is how many free cells the first waiting sequence needs that was left out for want of them.
    """

    step: Step
    group: AdapterSet
    free: int
    budget: int
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    wanted: int = 0

    def add_chunk(self, sequence: Sequence, most: int) -> None:
        """Compute more of a prompt: `most` tokens in this step, or what the budget and the cells allow."""
        place = next((i for i, (s, _) in enumerate(self.chunks) if s is sequence), None)
        before = 0 if place is None else self.chunks[place][1]
        more = min(most - before, self.budget, self.free)
        if more > 0:
            self.budget -= more
            self.free -= more
            if place is None:
                self.chunks.append((sequence, more))
            else:
                self.chunks[place] = (sequence, before + more)

    def add_admitted(self, sequence: Sequence, remaining: int) -> None:
        """Begin the prompt of a sequence just admitted, whose cells have all been set aside."""
        size = min(remaining, self.budget)
        if size > 0:
            self.chunks.append((sequence, size))
            self.budget -= size


@dataclass(frozen=True, slots=True)
class Admitter:
    """Reads the scheduler's parts and fills drafts; it changes none of them."""

    limits: Limits
    can_share: bool
    ledger: KVLedger
    prefixes: PrefixCache
    line: WaitingLine
    host: HostPrefixes | None

    def admit(self, draft: Draft, running: SequenceOf[Sequence], free_slots: list[int]) -> None:
        """Admit in the order of the line while a place, budget and cells for the whole prompt remain."""
        places = self.limits.running - len(running)
        if not self.line or places <= 0 or draft.budget <= 0:
            return
        # Prompts admitted earlier still claim the cells that they have not computed yet.
        claimed = {id(s): size for s, size in draft.chunks}
        claims = sum(len(s.tokens) - s.computed - claimed.get(id(s), 0) for s in running if not s.is_decoding)
        step, free_slots = draft.step, list(free_slots)
        retained = [entry.slot for entry in self.prefixes.retained()]
        sources: set[int] = set()
        for looked, sequence in enumerate(self.line):
            if places <= 0 or draft.budget <= 0 or looked >= 2 * self.limits.running:
                return
            source, shared, coming = self._match(sequence, step)
            saved, length = self._match_saved(sequence)
            if saved is not None and length - shared >= WORTH_SHARING:
                if any(admission.saved is saved for admission in step.admitted):
                    continue  # it is being copied back: the copy can be shared in the next step
                # All of it takes cells, also what is cut off again at once.
                need = sequence.cells_to_start + len(saved.ids) - length
                if claims + need > draft.free:
                    saved = None
                else:
                    source, shared = None, length
            else:
                saved = None
            if coming - shared >= WORTH_SHARING:
                continue  # the prefix is being computed: it is cheaper to wait for it
            if saved is None:
                need = sequence.cells_to_start - shared
            if claims + need > draft.free:
                draft.wanted = claims + sequence.cells_to_start + (self.ledger.free - draft.free)
                return
            if source is not None:
                sources.add(source)
            slot = free_slots.pop() if free_slots else _evict_slot(step, retained, sources)
            if slot is None:
                return
            step.admitted.append(Admission(sequence, slot, source, shared, saved))
            draft.free -= need
            if sequence.adapters == draft.group:
                draft.add_admitted(sequence, len(sequence.tokens) - shared)
            places -= 1

    def sources(self, places: int) -> set[int]:
        """Slots that the next sequences in the line, as many as there are places, begin with."""
        step = Step()
        matches = (self._match(sequence, step) for sequence in islice(self.line, max(0, places)))
        return {slot for slot, _, _ in matches if slot is not None}

    def _match_saved(self, sequence: Sequence) -> tuple[SavedPrefix | None, int]:
        if self.host is None or not self.can_share or sequence.wants_scores:
            return None, 0
        return self.host.match(sequence.ids, scope=sequence.scope, exact=sequence.exact)

    def _match(self, sequence: Sequence, step: Step) -> tuple[int | None, int, int]:
        """Source slot and length of the best computed prefix, and the length of the best coming one."""
        # Scoring needs the logits of every position, so it computes them all.
        if not self.can_share or sequence.wants_scores:
            return None, 0, 0
        ids = sequence.ids
        match = self.prefixes.match(
            ids, scope=sequence.scope, exact=sequence.exact, without=frozenset(step.evicted)
        )
        soon = (_shared_soon(ids, sequence, admission) for admission in step.admitted)
        return match.slot, match.length, max([match.coming, *soon])


def _evict_slot(step: Step, retained: list[int], sources: set[int]) -> int | None:
    """A slot to reuse, taken from the least recently used prefix that nobody is about to copy."""
    for slot in retained:
        if slot not in sources and slot not in step.evicted:
            step.evicted.append(slot)
            return slot
    return None


def _shared_soon(ids: NDArray[np.int32], sequence: Sequence, admission: Admission) -> int:
    other = admission.sequence
    if other.scope != sequence.scope or (sequence.exact and not other.exact):
        return 0
    return min(common_prefix(ids, other.ids), len(ids) - 1)
