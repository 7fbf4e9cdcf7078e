"""The scheduler's state, and everything that writes it.

Invariant: `schedule` reads and decides (`planner.py`); `begin`, `apply`, `accept`, `settle` and `finish`
write. Between the decision and the writes nothing else changes the state.
"""

from __future__ import annotations

import numpy as np

from kiln.core.tokens import FinishReason, Source
from kiln.engine.runner import Chunk, ModelCall
from kiln.engine.schedule.admission import Admitter
from kiln.engine.schedule.host import HostPrefixes, SavedPrefix
from kiln.engine.schedule.kv import KVLedger
from kiln.engine.schedule.plan import Admission, Copy, Limits, Pick, PlannedCall, Restore, Step
from kiln.engine.schedule.planner import Planner
from kiln.engine.schedule.prefix import WORTH_SHARING, Entry, PrefixCache
from kiln.engine.schedule.turns import Turns
from kiln.engine.schedule.waiting import WaitingLine
from kiln.engine.sequence import Sequence


class Scheduler:
    """Queues, slots and KV cells. Knows nothing of the model, the clock or the event loop."""

    def __init__(self, limits: Limits, host: HostPrefixes | None = None) -> None:
        """With `host`, prefixes that are given up are saved there, and taken from there."""
        self._host = host
        # Without a spare slot a retained prefix would stand in the way of the sequence that wants it.
        self._can_share = limits.can_share and limits.slots > limits.running
        self.ledger = KVLedger(slots=limits.slots, cells=limits.kv_cells)
        self.prefixes = PrefixCache()
        self._free_slots = list(range(limits.slots - 1, -1, -1))
        self._line = WaitingLine()
        self._turns = Turns(limits.turn_steps)
        self.switches = 0
        # Whether the last step gave prefixes up, which may have taken a while: the next one computes.
        self._has_copied = False
        # In order of admission: the head is the oldest.
        self.running: list[Sequence] = []
        self._planner = Planner(
            limits,
            ledger=self.ledger,
            prefixes=self.prefixes,
            line=self._line,
            running=self.running,
            free_slots=self._free_slots,
            turns=self._turns,
            host=host,
            admitter=Admitter(limits, self._can_share, self.ledger, self.prefixes, self._line, host),
        )

    @property
    def waiting(self) -> int:
        return len(self._line)

    @property
    def is_idle(self) -> bool:
        return not self.running and not self._line

    def add(self, sequence: Sequence) -> None:
        self._line.add(sequence)

    def schedule(self) -> Step:
        """Decide the next step. Does not change any state."""
        return self._planner.plan(may_give_up=not self._has_copied)

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
        if self._host is None or not self.is_idle or not self._planner.is_excessive(retained):
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

    def forget_saved(self, saved: SavedPrefix) -> None:
        """The model does not take this prefix back: it is not tried again."""
        if self._host is not None:
            self._host.forget(saved)

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
