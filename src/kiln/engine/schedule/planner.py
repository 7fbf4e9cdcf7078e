"""Decides what each step computes.

A step belongs to one group of sequences with equal adapters (`turns.py`). Decode comes first, in calls
of its own; then prefill chunks, oldest request first, within the step's token budget, which is smaller
while others decode so that a long prompt cannot stall them. A prompt whose prefix is computed already
starts from a copy of it; one whose prefix is just being computed waits for it (`admission.py`). When
the KV cache cannot hold a step, the step makes room instead of computing (`room.py`): retained prefixes
go first, the least recently used foremost; then the youngest sequence is preempted and recomputed later
from its token ids, so nothing is lost; the oldest always fits and has the turn after that, so there is
no deadlock. Making room frees cells (`kv.py`), so exact sequences that run are recomputed too.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from kiln.engine.ports import AdapterSet
from kiln.engine.schedule.admission import Admitter, Draft
from kiln.engine.schedule.calls import EXACT_ROWS, decode_calls, prefill_calls
from kiln.engine.schedule.host import HostPrefixes
from kiln.engine.schedule.kv import KVLedger
from kiln.engine.schedule.plan import Limits, Step
from kiln.engine.schedule.prefix import Entry, PrefixCache
from kiln.engine.schedule.room import make_room
from kiln.engine.schedule.turns import Turns
from kiln.engine.schedule.waiting import WaitingLine
from kiln.engine.sequence import Sequence

# Fewer dead cells than this are not worth a collection.
COLLECT_CELLS = 64
# Nothing is drafted when less than one in so many cells is free.
DRAFT_RESERVE = 8


@dataclass(frozen=True, slots=True)
class Planner:
    """Reads the scheduler's parts, which are these very objects; it changes none of them."""

    limits: Limits
    ledger: KVLedger
    prefixes: PrefixCache
    line: WaitingLine
    running: SequenceOf[Sequence]
    free_slots: list[int]
    turns: Turns
    host: HostPrefixes | None
    admitter: Admitter

    def plan(self, *, may_give_up: bool) -> Step:
        """The next step. With `may_give_up` it may be one that only gives retained prefixes up."""
        # Given up before a collection, so that what is copied out is still as exact as it was computed.
        excess = self._excess() if may_give_up else []
        if excess:
            return Step(evicted=excess)
        if self._may_collect():
            # A step of its own: an admission in it would still see prefixes as exact.
            return Step(collects=True)
        wanted = 0
        for group in self.turns.order(self._groups()):
            draft = self._draft(group)
            if draft is None:
                return self._make_room([s for s in self.running if s.adapters == group and s.is_decoding])
            wanted = wanted or draft.wanted
            if draft.wanted and not any(s.exact for s in self.running):
                # The head of the line lacks cells: make room for it if that costs no exact sequence its work.
                room = make_room(
                    self.ledger, self.prefixes, self.running, cells=draft.wanted, may_preempt=False
                )
                if room is not None:
                    return room
            if draft.step.computes:
                if draft.step.admitted and self.is_excessive(self.prefixes.retained()):
                    # Once they share what they begin with the rest can go, and their cells lie low.
                    draft.step.decode, draft.step.prefill = [], []
                return draft.step
        return self._make_room(self.running[:1], cells=0 if self.running else wanted)

    def _groups(self) -> list[AdapterSet]:
        """The groups that may have something to compute, those of the oldest sequences first."""
        groups = [sequence.adapters for sequence in self.running]
        first = next(iter(self.line), None)
        if first is not None and len(self.running) < self.limits.running:
            # If it was the oldest and had to start again, it has the turn.
            groups.append(first.adapters)
        return groups

    def _draft(self, group: AdapterSet) -> Draft | None:
        """What a step of a group would compute; None if its decode rows lack cells."""
        own = [s for s in self.running if s.adapters == group]
        decoding = [s for s in own if s.is_decoding]
        free = self.ledger.free - len(decoding)
        if free < 0:
            return None
        drafted = self._propose(decoding, free)
        free -= sum(len(tokens) for _, tokens in drafted)
        # Those that decode in other groups wait for this step too.
        stalls = any(s.is_decoding for s in self.running)
        budget = min(self.limits.step_tokens, self.limits.max_rows)
        if stalls:
            budget = min(budget, self.limits.stall_tokens)
        draft = Draft(Step(turn=group), group, free, budget)
        prefilling = [s for s in own if not s.is_decoding]
        for sequence in prefilling[:1]:
            # Half of the step is for those behind it: a short prompt need not wait for all of a long one.
            draft.add_chunk(sequence, min(sequence.uncomputed, -(-draft.budget // 2)))
        for sequence in prefilling[1:]:
            draft.add_chunk(sequence, sequence.uncomputed)
        self.admitter.admit(draft, self.running, self.free_slots)
        for sequence in prefilling[:1]:
            # Nobody needed it.
            draft.add_chunk(sequence, sequence.uncomputed)
        draft.step.decode = decode_calls(drafted, self.limits.max_rows)
        draft.step.prefill = prefill_calls(draft.chunks, {id(a.sequence): a for a in draft.step.admitted})
        return draft

    def _propose(self, decoding: list[Sequence], free: int) -> list[tuple[Sequence, list[int]]]:
        """What may follow each decoding sequence, as far as rows and cells go that nobody else needs."""
        if not any(sequence.drafter for sequence in decoding):
            return [(sequence, []) for sequence in decoding]
        # Rejected cells are dead until a collection: no drafts where they would bring one about.
        most = min(self.limits.draft_rows, self.limits.max_rows, EXACT_ROWS) - len(decoding)
        rows = min(most, free - self.ledger.cells // DRAFT_RESERVE)
        if not self.limits.exact_drafts and any(sequence.exact for sequence in decoding):
            rows = 0
        proposed = []
        for left, sequence in zip(range(len(decoding), 0, -1), decoding, strict=True):
            draft = sequence.propose(-(-rows // left)) if rows > 0 else []
            rows -= len(draft)
            proposed.append((sequence, draft))
        return proposed

    def _may_collect(self) -> bool:
        """Whether dead cells are worth freeing now, at no cost: none belongs to the past of an exact one."""
        if any(sequence.exact for sequence in self.running):
            return False
        return self.ledger.dead >= COLLECT_CELLS

    def _excess(self) -> list[int]:
        """Slots of retained prefixes to give up while requests run, the least recently used first.

        Prefixes that sequences about to be admitted begin with are not among them.
        """
        retained = self.prefixes.retained()
        if not (self.running or self.line) or not self.is_excessive(retained):
            return []
        wanted = self.admitter.sources(self.limits.running - len(self.running))
        slots: list[int] = []
        left = sum(entry.computed for entry in retained)
        for entry in retained:
            if left <= self.limits.retain_tokens:
                break
            if entry.slot in wanted:
                continue
            left -= entry.computed
            slots.append(entry.slot)
            if self.host is not None and not entry.covered:
                # Copying takes a while: one a step.
                break
        return slots

    def is_excessive(self, retained: list[Entry]) -> bool:
        """Whether retained prefixes hold more tokens than may be kept for requests that have ended."""
        return sum(entry.computed for entry in retained) > self.limits.retain_tokens

    def _make_room(self, rows: SequenceOf[Sequence], *, cells: int = 0) -> Step:
        """A step that only makes room; the oldest computes next. `stuck` where there is no room to make."""
        oldest = self.running[0] if self.running else next(iter(self.line), None)
        step = make_room(self.ledger, self.prefixes, self.running, rows=rows, cells=cells)
        if step is None:
            # Nothing else holds cells, so what does not fit now never will.
            return Step(stuck=oldest)
        step.turn = oldest.adapters if oldest is not None else None
        return step
