"""Decides what each step computes, and writes the results back.

Invariant: `schedule` reads and decides; `begin`, `apply`, `accept` and `finish` write. Between the
decision and the writes nothing else changes the state.

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

import numpy as np

from kiln.core.tokens import FinishReason, Source
from kiln.engine.ports import AdapterSet
from kiln.engine.runner import Chunk, ModelCall
from kiln.engine.schedule.admission import Admitter, Draft
from kiln.engine.schedule.calls import EXACT_ROWS, decode_calls, prefill_calls
from kiln.engine.schedule.host import HostPrefixes
from kiln.engine.schedule.kv import KVLedger
from kiln.engine.schedule.plan import Admission, Copy, Limits, Pick, PlannedCall, Restore, Step
from kiln.engine.schedule.prefix import WORTH_SHARING, Entry, PrefixCache
from kiln.engine.schedule.room import make_room
from kiln.engine.schedule.turns import Turns
from kiln.engine.schedule.waiting import WaitingLine
from kiln.engine.sequence import Sequence

# Fewer dead cells than this are not worth a collection.
COLLECT_CELLS = 64
# Nothing is drafted when less than one in so many cells is free.
DRAFT_RESERVE = 8


class Scheduler:
    """Queues, slots and KV cells. Knows nothing of the model, the clock or the event loop."""

    def __init__(self, limits: Limits, host: HostPrefixes | None = None) -> None:
        """With `host`, prefixes that are given up are saved there, and taken from there."""
        self._limits = limits
        self._host = host
        # Without a spare slot a retained prefix would stand in the way of the sequence that wants it.
        self._can_share = limits.can_share and limits.slots > limits.running
        self.ledger = KVLedger(slots=limits.slots, cells=limits.kv_cells)
        self.prefixes = PrefixCache()
        self._free_slots = list(range(limits.slots - 1, -1, -1))
        self._line = WaitingLine()
        self._admitter = Admitter(limits, self._can_share, self.ledger, self.prefixes, self._line, host)
        self._turns = Turns(limits.turn_steps)
        self.switches = 0
        # Whether the last step gave prefixes up, which may have taken a while: the next one computes.
        self._has_copied = False
        # In order of admission: the head is the oldest.
        self.running: list[Sequence] = []

    @property
    def waiting(self) -> int:
        return len(self._line)

    @property
    def is_idle(self) -> bool:
        return not self.running and not self._line

    def add(self, sequence: Sequence) -> None:
        self._line.add(sequence)

    # Deciding.

    def schedule(self) -> Step:
        """Decide the next step. Does not change any state."""
        if self._may_collect():
            # A step of its own: an admission in it would still see prefixes as exact.
            return Step(collects=True)
        excess = [] if self._has_copied else self._excess()
        if excess:
            return Step(evicted=excess)
        wanted = 0
        for group in self._turns.order(self._groups()):
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
                if draft.step.admitted and self._is_excessive(self.prefixes.retained()):
                    # Once they share what they begin with the rest can go, and their cells lie low.
                    draft.step.decode, draft.step.prefill = [], []
                return draft.step
        return self._make_room(self.running[:1], cells=0 if self.running else wanted)

    def _groups(self) -> list[AdapterSet]:
        """The groups that may have something to compute, those of the oldest sequences first."""
        groups = [sequence.adapters for sequence in self.running]
        first = next(iter(self._line), None)
        if first is not None and len(self.running) < self._limits.running:
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
        budget = self._limits.stall_tokens if stalls else self._limits.step_tokens
        draft = Draft(Step(turn=group), group, free, min(budget, self._limits.max_rows))
        prefilling = [s for s in own if not s.is_decoding]
        for sequence in prefilling[:1]:
            # Half of the step is for those behind it: a short prompt need not wait for all of a long one.
            draft.add_chunk(sequence, min(sequence.uncomputed, -(-draft.budget // 2)))
        for sequence in prefilling[1:]:
            draft.add_chunk(sequence, sequence.uncomputed)
        self._admitter.admit(draft, self.running, self._free_slots)
        for sequence in prefilling[:1]:
            # Nobody needed it.
            draft.add_chunk(sequence, sequence.uncomputed)
        draft.step.decode = decode_calls(drafted, self._limits.max_rows)
        draft.step.prefill = prefill_calls(draft.chunks, {id(a.sequence): a for a in draft.step.admitted})
        return draft

    def _propose(self, decoding: list[Sequence], free: int) -> list[tuple[Sequence, list[int]]]:
        """What may follow each decoding sequence, as far as rows and cells go that nobody else needs."""
        if not any(sequence.drafter for sequence in decoding):
            return [(sequence, []) for sequence in decoding]
        # Rejected cells are dead until a collection: no drafts where they would bring one about.
        most = min(self._limits.draft_rows, self._limits.max_rows, EXACT_ROWS) - len(decoding)
        rows = min(most, free - self.ledger.cells // DRAFT_RESERVE)
        if not self._limits.exact_drafts and any(sequence.exact for sequence in decoding):
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
        if self.is_idle or not self._is_excessive(retained):
            return []
        wanted = self._admitter.sources(self._limits.running - len(self.running))
        slots: list[int] = []
        left = sum(entry.computed for entry in retained)
        for entry in retained:
            if left <= self._limits.retain_tokens:
                break
            if entry.slot in wanted:
                continue
            left -= entry.computed
            slots.append(entry.slot)
            if self._host is not None and not entry.covered:
                # Copying takes a while: one a step.
                break
        return slots

    def _is_excessive(self, retained: list[Entry]) -> bool:
        return sum(entry.computed for entry in retained) > self._limits.retain_tokens

    def _make_room(self, rows: list[Sequence], *, cells: int = 0) -> Step:
        """A step that only makes room; the oldest computes next. `stuck` where there is no room to make."""
        oldest = self.running[0] if self.running else next(iter(self._line), None)
        step = make_room(self.ledger, self.prefixes, self.running, rows=rows, cells=cells)
        if step is None:
            # Nothing else holds cells, so what does not fit now never will.
            return Step(stuck=oldest)
        step.turn = oldest.adapters if oldest is not None else None
        return step

    # Writing.

    def begin(self, step: Step, now: float) -> tuple[list[int], list[Copy | Restore]]:
        """Write admissions, evictions and preemptions. Returns slots to drop, then prefixes to copy.

        Nothing may have been dropped yet when it is called: what is given up is saved here.

        If the step collects, that is to be done between the drops and the copies.
        """
        if step.turn is not None:
            if step.computes:
                self.switches += self._turns.take(step.turn)
            else:
                self._turns.give(step.turn)
        dropped = list(step.evicted)
        self._has_copied = not step.computes and self._host is not None and bool(step.evicted)
        for slot in step.evicted:
            self._retire(slot)
        dropped.extend(self.preempt(sequence) for sequence in step.preempted)
        if step.collects:
            self.ledger.collect()
            # What comes after these cells would lie before them.
            self.prefixes.forget_exactness()
        copies: list[Copy | Restore] = []
        for admission in step.admitted:
            self._place(admission, now)
            if admission.saved is not None:
                copies.append(Restore(admission.saved, admission.slot, admission.shared))
            if admission.source is not None:
                copies.append(Copy(admission.source, admission.slot, admission.shared))
        return dropped, copies

    def _place(self, admission: Admission, now: float) -> None:
        sequence, slot = admission.sequence, admission.slot
        self._line.admit(sequence)
        self._free_slots.remove(slot)
        sequence.slot = slot
        sequence.computed = admission.shared
        if sequence.admitted is None:
            sequence.admitted = now
            sequence.cached_tokens = admission.shared
        exact = 0
        if admission.source is not None:
            self.ledger.share(admission.source, slot, admission.shared)
            self.prefixes.touch(admission.source)
            source = self.prefixes.get(admission.source)
            if source is not None:
                exact = min(admission.shared, source.exact)
                source.covered = not source.busy and admission.shared == source.computed
        elif admission.saved is not None:
            self.ledger.extend(slot, len(admission.saved.ids))
            self.ledger.trim(slot, admission.shared)
            exact = min(admission.shared, admission.saved.exact)
            if self._host is not None:
                self._host.touch(admission.saved)
        self.prefixes.put(
            Entry(
                slot,
                sequence.ids,
                scope=sequence.scope,
                computed=admission.shared,
                exact=exact,
                exactly=sequence.exact,
            )
        )
        self.running.append(sequence)

    def apply(self, planned: PlannedCall) -> None:
        """Write that a call was computed."""
        for chunk, sequence in zip(planned.call.chunks, planned.rows, strict=True):
            assert sequence.slot is not None
            self.ledger.extend(sequence.slot, len(chunk.tokens))
            sequence.computed = chunk.start + len(chunk.tokens)
            entry = self.prefixes.get(sequence.slot)
            if entry is not None:
                entry.computed = min(sequence.computed, len(entry.ids))
                if entry.exactly:
                    entry.exact = entry.computed

    def accept(self, sequence: Sequence, pick: Pick, now: float) -> FinishReason | None:
        """Append a picked token. Returns why the sequence ends, or None if it goes on."""
        sequence.record(pick.token)
        if sequence.first_token is None:
            sequence.first_token = now
        if pick.token in sequence.request.eos_ids and pick.source is Source.SAMPLED:
            return FinishReason.STOP
        if sequence.grammar is not None and sequence.grammar.is_complete:
            return FinishReason.STOP
        if sequence.generated >= sequence.request.max_tokens:
            return FinishReason.LENGTH
        return None

    def settle(self, sequence: Sequence, planned: Chunk, picked: int) -> int:
        """Write how many tokens were picked from a drafted chunk. Returns how many of its slot are valid.

        What the model computed behind a rejected token is dead.
        """
        assert sequence.slot is not None and sequence.drafter is not None
        sequence.computed = planned.start + picked
        self.ledger.trim(sequence.slot, sequence.computed)
        sequence.drafter.judge(len(planned.tokens) - 1, picked - 1)
        return sequence.computed

    def finish(self, sequence: Sequence) -> list[int]:
        """Take a sequence out, wherever it is; keep its KV as a prefix if it is worth it.

        Returns the slots whose KV must be dropped.
        """
        if sequence.slot is None:
            if sequence in self._line:
                self._line.remove(sequence)
            return []
        slot = sequence.slot
        self.running.remove(sequence)
        sequence.slot = None
        entry = self.prefixes.get(slot)
        assert entry is not None
        entry.busy = False
        entry.ids = np.asarray(sequence.tokens[: sequence.computed], np.int32)
        entry.computed = sequence.computed
        if entry.exactly:
            entry.exact = entry.computed
        self.prefixes.touch(slot)
        if not self._can_share or entry.computed < WORTH_SHARING:
            self._release(slot)
            return [slot]
        dropped = [other.slot for other in self.prefixes.covered_by(entry)]
        for other in dropped:
            self._release(other)
        return dropped

    def tidy(self) -> list[int]:
        """Give up a retained prefix while nothing runs, if the host's memory can keep it.

        Returns the slot whose KV must be dropped; none once there is no more to give up. A cache that is
        empty when the next request comes is one whose cells in use are its own.
        """
        retained = self.prefixes.retained()
        if self._host is None or not self.is_idle or not self._is_excessive(retained):
            return []
        for entry in retained:
            if self._host.keep(entry):
                self._release(entry.slot)
                return [entry.slot]
        return []

    def preempt(self, sequence: Sequence) -> int:
        """Give a running sequence's cells back and put it at the head of its queue. Returns its slot."""
        slot = sequence.slot
        assert slot is not None
        self.running.remove(sequence)
        self._release(slot)
        sequence.slot = None
        sequence.computed = 0
        self._line.put_back(sequence)
        return slot

    def collect_now(self) -> bool:
        """Free dead cells outside a step. False, and nothing done, while an exact sequence runs."""
        if any(sequence.exact for sequence in self.running):
            return False
        self.ledger.collect()
        self.prefixes.forget_exactness()
        return True

    def learn_exhausted(self, call: ModelCall) -> None:
        """The native cache keeps refusing a call that the books have room for: believe it from now on."""
        self.ledger.write_off(max(0, self.ledger.free - call.rows + 1))

    def forget_all(self) -> list[int]:
        """Drop every retained prefix. Returns the slots whose KV must be dropped."""
        slots = [entry.slot for entry in self.prefixes.retained()]
        for slot in slots:
            self._release(slot)
        return slots

    def _retire(self, slot: int) -> None:
        """Give up a retained prefix in the cache; the host's memory may keep it."""
        entry = self.prefixes.get(slot)
        if self._host is not None and entry is not None and not entry.covered:
            self._host.keep(entry)
        self._release(slot)

    def _release(self, slot: int) -> None:
        self.ledger.release(slot)
        self.prefixes.drop(slot)
        self._free_slots.append(slot)
