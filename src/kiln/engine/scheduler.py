"""Decides what each step computes, and writes the results back.

Invariant: `schedule` reads and decides; `begin`, `apply`, `accept` and `finish` write. Between the
decision and the writes nothing else changes the state.

Decode comes first, in calls of its own; then prefill chunks, oldest request first, within the step's
token budget, which is smaller while others decode so that a long prompt cannot stall them. A prompt
whose prefix is computed already starts from a copy of it; one whose prefix is just being computed
waits for it. When the KV cache cannot hold a step, the step makes room instead of computing: retained
prefixes go first, the least recently used foremost; then the youngest sequence is preempted and
recomputed later from its token ids, so nothing is lost; the oldest always fits, so there is no
deadlock. Making room frees cells (`kv.py`), so exact sequences that run are recomputed too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from kiln.core.tokens import FinishReason, Source
from kiln.engine.kv import KVLedger, common_prefix
from kiln.engine.plan import Admission, Copy, Limits, Pick, PlannedCall, Step
from kiln.engine.ports import Chunk, LogitsWanted, ModelCall
from kiln.engine.prefix import WORTH_SHARING, Entry, PrefixCache
from kiln.engine.sequence import Sequence

# Calls of at most so many rows go through the kernels that decoding uses (ARCHITECTURE.md, exactness).
EXACT_ROWS = 63
# So many requests of the first class may overtake a waiting one of the second.
PRIORITY_STREAK = 4
# Fewer dead cells than this are not worth a collection.
COLLECT_CELLS = 1024


class Scheduler:
    """Queues, slots and KV cells. Knows nothing of the model, the clock or the event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        # Without a spare slot a retained prefix would stand in the way of the sequence that wants it.
        self._can_share = limits.can_share and limits.slots > limits.running
        self.ledger = KVLedger(slots=limits.slots, cells=limits.kv_cells)
        self.prefixes = PrefixCache()
        self._free_slots = list(range(limits.slots - 1, -1, -1))
        self._queues: tuple[deque[Sequence], deque[Sequence]] = (deque(), deque())
        self._streak = 0
        # In order of admission: the head is the oldest.
        self.running: list[Sequence] = []

    @property
    def waiting(self) -> int:
        return sum(len(queue) for queue in self._queues)

    @property
    def is_idle(self) -> bool:
        return not self.running and not any(self._queues)

    def add(self, sequence: Sequence) -> None:
        self._queue_of(sequence).append(sequence)

    # Deciding.

    def schedule(self) -> Step:
        """Decide the next step. Does not change any state."""
        if self._may_collect():
            # A step of its own: an admission in it would still see prefixes as exact.
            return Step(collects=True)
        decoding = [s for s in self.running if s.is_decoding]
        free = self.ledger.free
        if len(decoding) > free:
            return self._make_room(rows=decoding)
        step = Step()
        step.decode = [
            self._call([(s, 1) for s in decoding[at : at + EXACT_ROWS]])
            for at in range(0, len(decoding), EXACT_ROWS)
        ]
        free -= len(decoding)
        budget = self._limits.stall_tokens if decoding else self._limits.step_tokens
        budget = min(budget, self._limits.max_rows)
        chunks: list[tuple[Sequence, int]] = []
        for sequence in self.running:
            if not sequence.is_decoding:
                size = min(len(sequence.tokens) - sequence.computed, budget, free)
                if size > 0:
                    chunks.append((sequence, size))
                    budget -= size
                    free -= size
        wanted = self._admit(step, free, budget, chunks)
        step.prefill = self._prefill_calls(chunks, {id(a.sequence): a for a in step.admitted})
        if wanted and not any(s.exact for s in self.running):
            # The head of the queue lacks cells: make room for it if that costs no exact sequence its work.
            room = self._make_room(cells=wanted, may_preempt=False)
            if room.collects:
                return room
        if not step.decode and not step.prefill:
            return self._make_room(rows=self.running[:1], cells=0 if self.running else wanted)
        return step

    def _may_collect(self) -> bool:
        """Whether dead cells are worth freeing now, at no cost: none belongs to the past of an exact one."""
        if any(sequence.exact for sequence in self.running):
            return False
        held = self.ledger.cells - self.ledger.free - self.ledger.dead
        return self.ledger.dead > max(COLLECT_CELLS, held // 4)

    def _make_room(
        self, *, rows: SequenceOf[Sequence] = (), cells: int = 0, may_preempt: bool = True
    ) -> Step:
        """A step that computes nothing and frees a cell for each of `rows` that stays, and `cells` more.

        It is `stuck` if that cannot be, or, where it may not preempt, frees nothing.
        """
        step = Step()
        retained = [entry.slot for entry in self.prefixes.retained()]
        keep = list(self.running)
        while True:
            # Freed cells would break the order of exact sequences: they start again in the new order.
            restart = [s for s in keep if s.exact]
            slots = [*step.evicted, *(s.slot for s in (*step.preempted, *restart) if s.slot is not None)]
            need = cells + sum(1 for s in rows if s in keep and not s.exact)
            # Those that start again take back what they had, their next row included.
            need += sum(len(sequence.tokens) for sequence in restart)
            if self.ledger.free + self.ledger.dead + self._would_free(slots) >= need:
                # Preempted last is first in the queue: the oldest must come back first.
                step.preempted = [*step.preempted, *reversed(restart)]
                step.collects = True
                return step
            if retained:
                step.evicted.append(retained.pop(0))
            elif may_preempt and len(keep) > 1:
                step.preempted.append(keep.pop())
            elif may_preempt:
                # Nothing else holds cells, so what does not fit now never will.
                return Step(stuck=keep[0] if keep else next(self._in_turn(), None))
            else:
                return Step()

    def _admit(self, step: Step, free: int, budget: int, chunks: list[tuple[Sequence, int]]) -> int:
        """Admit in queue order while a place, budget and cells for the whole prompt remain.

        Returns how many free cells the first one needs that was left out for want of cells, else 0.
        """
        places = self._limits.running - len(self.running)
        if places <= 0 or budget <= 0:
            return 0
        # Prompts admitted earlier still claim the cells that they have not computed yet.
        claimed = {id(s): size for s, size in chunks}
        claims = sum(
            len(s.tokens) - s.computed - claimed.get(id(s), 0) for s in self.running if not s.is_decoding
        )
        free_slots = list(self._free_slots)
        retained = [entry.slot for entry in self.prefixes.retained()]
        sources: set[int] = set()
        for looked, sequence in enumerate(self._in_turn()):
            if places <= 0 or budget <= 0 or looked >= 2 * self._limits.running:
                return 0
            source, shared, coming = self._match(sequence, step)
            if coming - shared >= WORTH_SHARING:
                continue  # the prefix is being computed: it is cheaper to wait for it
            need = sequence.cells_to_start - shared
            if claims + need > free:
                return claims + sequence.cells_to_start + (self.ledger.free - free)
            if source is not None:
                sources.add(source)
            slot = free_slots.pop() if free_slots else self._evict_slot(step, retained, sources)
            if slot is None:
                return 0
            step.admitted.append(Admission(sequence, slot, source, shared))
            size = min(len(sequence.tokens) - shared, budget)
            chunks.append((sequence, size))
            budget -= size
            free -= need
            places -= 1
        return 0

    @staticmethod
    def _evict_slot(step: Step, retained: list[int], sources: set[int]) -> int | None:
        """A slot to reuse, taken from the least recently used prefix that nobody is about to copy."""
        for slot in retained:
            if slot not in sources and slot not in step.evicted:
                step.evicted.append(slot)
                return slot
        return None

    def _match(self, sequence: Sequence, step: Step) -> tuple[int | None, int, int]:
        """Source slot and length of the best computed prefix, and the length of the best coming one."""
        # Scoring needs the logits of every position, so it computes them all.
        if not self._can_share or sequence.wants_scores:
            return None, 0, 0
        ids = sequence.ids
        match = self.prefixes.match(
            ids, scope=sequence.scope, exact=sequence.exact, without=frozenset(step.evicted)
        )
        soon = (self._shared_soon(ids, sequence, admission) for admission in step.admitted)
        return match.slot, match.length, max([match.coming, *soon])

    @staticmethod
    def _shared_soon(ids: NDArray[np.int32], sequence: Sequence, admission: Admission) -> int:
        other = admission.sequence
        if other.scope != sequence.scope or (sequence.exact and not other.exact):
            return 0
        return min(common_prefix(ids, other.ids), len(ids) - 1)

    def _in_turn(self) -> Iterator[Sequence]:
        """Waiting sequences, those with priority first, but not so many in a row that others starve."""
        first, second = list(self._queues[0]), list(self._queues[1])
        streak = self._streak
        while first or second:
            if first and (streak < PRIORITY_STREAK or not second):
                streak += 1
                yield first.pop(0)
            else:
                streak = 0
                yield second.pop(0)

    def _prefill_calls(
        self, chunks: list[tuple[Sequence, int]], admitted: dict[int, Admission]
    ) -> list[PlannedCall]:
        """One call for all ordinary chunks; exact chunks in small calls of their own."""
        calls = []
        ordinary = [(s, size) for s, size in chunks if not s.exact]
        if ordinary:
            calls.append(self._call(ordinary, admitted))
        for sequence, size in chunks:
            if sequence.exact:
                calls.extend(self._exact_calls(sequence, size, admitted))
        return calls

    def _exact_calls(
        self, sequence: Sequence, size: int, admitted: dict[int, Admission]
    ) -> Iterator[PlannedCall]:
        start = self._start(sequence, admitted)
        for at in range(start, start + size, EXACT_ROWS):
            rows = min(EXACT_ROWS, start + size - at)
            chunk = self._chunk(sequence, at, rows, admitted)
            yield PlannedCall(ModelCall((chunk,), exact=True), (sequence,))

    def _call(
        self, chunks: list[tuple[Sequence, int]], admitted: dict[int, Admission] | None = None
    ) -> PlannedCall:
        admitted = admitted or {}
        built = tuple(self._chunk(s, self._start(s, admitted), size, admitted) for s, size in chunks)
        exact = any(sequence.exact for sequence, _ in chunks)
        return PlannedCall(ModelCall(built, exact=exact), tuple(s for s, _ in chunks))

    @staticmethod
    def _start(sequence: Sequence, admitted: dict[int, Admission]) -> int:
        admission = admitted.get(id(sequence))
        return sequence.computed if admission is None else admission.shared

    @staticmethod
    def _chunk(sequence: Sequence, start: int, size: int, admitted: dict[int, Admission]) -> Chunk:
        admission = admitted.get(id(sequence))
        slot = sequence.slot if admission is None else admission.slot
        assert slot is not None
        last = start + size == len(sequence.tokens)
        wanted: LogitsWanted = "all" if sequence.wants_scores else "last" if last else "none"
        return Chunk(slot, start, sequence.tokens[start : start + size], wanted)

    def _would_free(self, slots: list[int]) -> int:
        return self.ledger.would_free(slots) if slots else 0

    # Writing.

    def begin(self, step: Step, now: float) -> tuple[list[int], list[Copy]]:
        """Write admissions, evictions and preemptions. Returns slots to drop, then prefixes to copy.

        If the step collects, that is to be done between the drops and the copies.
        """
        dropped = list(step.evicted)
        for slot in step.evicted:
            self._release(slot)
        dropped.extend(self.preempt(sequence) for sequence in step.preempted)
        if step.collects:
            self.ledger.collect()
            # What comes after these cells would lie before them.
            self.prefixes.forget_exactness()
        copies = []
        for admission in step.admitted:
            self._place(admission, now)
            if admission.source is not None:
                copies.append(Copy(admission.source, admission.slot, admission.shared))
        return dropped, copies

    def _place(self, admission: Admission, now: float) -> None:
        sequence, slot = admission.sequence, admission.slot
        queue = self._queue_of(sequence)
        queue.remove(sequence)
        self._streak = self._streak + 1 if queue is self._queues[0] else 0
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
            exact = min(admission.shared, source.exact) if source is not None else 0
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
        sequence.tokens.append(pick.token)
        sequence.sampler.record(pick.token)
        if sequence.first_token is None:
            sequence.first_token = now
        if pick.token in sequence.request.eos_ids and pick.source is Source.SAMPLED:
            return FinishReason.STOP
        if sequence.grammar is not None and sequence.grammar.is_complete:
            return FinishReason.STOP
        if sequence.generated >= sequence.request.max_tokens:
            return FinishReason.LENGTH
        return None

    def finish(self, sequence: Sequence) -> list[int]:
        """Take a sequence out, wherever it is; keep its KV as a prefix if it is worth it.

        Returns the slots whose KV must be dropped.
        """
        if sequence.slot is None:
            queue = self._queue_of(sequence)
            if sequence in queue:
                queue.remove(sequence)
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
        return dropped + self._drop_oldest()

    def _drop_oldest(self) -> list[int]:
        """Release the least recently used prefixes beyond what may be retained. Returns their slots."""
        retained = self.prefixes.retained()
        excess = sum(entry.computed for entry in retained) - self._limits.retain_tokens
        dropped = []
        for entry in retained:
            if excess <= 0:
                break
            excess -= entry.computed
            self._release(entry.slot)
            dropped.append(entry.slot)
        return dropped

    def preempt(self, sequence: Sequence) -> int:
        """Give a running sequence's cells back and put it at the head of its queue. Returns its slot."""
        slot = sequence.slot
        assert slot is not None
        self.running.remove(sequence)
        self._release(slot)
        sequence.slot = None
        sequence.computed = 0
        self._queue_of(sequence).appendleft(sequence)
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

    def _release(self, slot: int) -> None:
        self.ledger.release(slot)
        self.prefixes.drop(slot)
        self._free_slots.append(slot)

    def _queue_of(self, sequence: Sequence) -> deque[Sequence]:
        return self._queues[0 if sequence.request.priority else 1]
