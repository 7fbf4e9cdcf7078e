"""Decides what each step computes, and writes the results back.

Invariant: `schedule` reads and decides, `apply` writes. Between the two the state of every running
sequence is the one that the step was built from.

Decode comes first, in a call of its own; then prefill chunks, oldest request first, within the
step's token budget. When the KV cache cannot hold a step, the youngest sequence is preempted: it
gives its cells back and is recomputed later from its token ids, so nothing is lost; the oldest
always fits, so there is no deadlock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kiln.core.tokens import FinishReason, Source
from kiln.engine.ports import Chunk, ModelCall
from kiln.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of the loop: up to two model calls, with the sequences of their chunks in order."""

    decode: ModelCall | None
    decode_rows: tuple[Sequence, ...]
    prefill: ModelCall | None
    prefill_rows: tuple[Sequence, ...]
    admitted: tuple[tuple[Sequence, int], ...]
    preempted: tuple[Sequence, ...]


@dataclass(frozen=True, slots=True)
class Pick:
    """The token chosen for a sequence's next position."""

    token: int
    source: Source
    logprob: float | None


class Scheduler:
    """Queues, slots and KV cells. Knows nothing of the model, the clock or the event loop."""

    def __init__(self, *, slots: int, kv_cells: int, step_tokens: int, max_rows: int) -> None:
        self._free_slots = list(range(slots - 1, -1, -1))
        self._kv_cells = kv_cells
        self._step_tokens = min(step_tokens, max_rows)
        self.waiting: deque[Sequence] = deque()
        # In order of admission: the head is the oldest.
        self.running: list[Sequence] = []

    @property
    def cells_used(self) -> int:
        return sum(sequence.computed for sequence in self.running)

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.waiting

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> Step:
        """Decide the next step. Does not change any state."""
        keep, preempted = self._fit_decode()
        decoding = [s for s in keep if s.is_decoding]
        cells = self._kv_cells - sum(s.computed for s in keep) - len(decoding)
        budget = self._step_tokens
        prefill: list[tuple[Sequence, int]] = []
        for sequence in keep:
            if sequence.is_decoding or budget <= 0:
                continue
            size = min(len(sequence.tokens) - sequence.computed, budget, cells)
            if size > 0:
                prefill.append((sequence, size))
                budget -= size
                cells -= size
        admitted = self._admit(budget, cells, prefill) if not preempted else []
        return Step(
            decode=ModelCall(tuple(self._decode_chunk(s) for s in decoding)) if decoding else None,
            decode_rows=tuple(decoding),
            prefill=self._prefill_call(prefill, dict(admitted)) if prefill else None,
            prefill_rows=tuple(s for s, _ in prefill),
            admitted=tuple(admitted),
            preempted=tuple(preempted),
        )

    def begin(self, step: Step, now: float) -> list[int]:
        """Write the step's admissions and preemptions. Returns the slots whose KV must be dropped."""
        dropped = [self.preempt(sequence) for sequence in step.preempted]
        for sequence, slot in step.admitted:
            self.waiting.remove(sequence)
            self._free_slots.remove(slot)
            sequence.slot = slot
            if sequence.admitted is None:
                sequence.admitted = now
            self.running.append(sequence)
        return dropped

    def apply(self, call: ModelCall, rows: tuple[Sequence, ...]) -> None:
        """Write that a call was computed."""
        for chunk, sequence in zip(call.chunks, rows, strict=True):
            sequence.computed = chunk.start + len(chunk.tokens)

    def accept(self, sequence: Sequence, pick: Pick, now: float) -> FinishReason | None:
        """Append a picked token. Returns why the sequence ends, or None if it goes on."""
        sequence.tokens.append(pick.token)
        sequence.sampler.record(pick.token)
        if sequence.first_token is None:
            sequence.first_token = now
        if pick.token in sequence.request.eos_ids and pick.source is Source.SAMPLED:
            return FinishReason.STOP
        if sequence.generated >= sequence.request.max_tokens:
            return FinishReason.LENGTH
        return None

    def remove(self, sequence: Sequence) -> int | None:
        """Take a sequence out, wherever it is. Returns the slot whose KV must be dropped, if it had one."""
        if sequence.slot is None:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            return None
        slot = sequence.slot
        self.running.remove(sequence)
        self._free_slots.append(slot)
        sequence.slot = None
        return slot

    def preempt(self, sequence: Sequence) -> int:
        """Give a running sequence's cells back and put it at the head of the queue."""
        slot = self.remove(sequence)
        assert slot is not None
        sequence.computed = 0
        self.waiting.appendleft(sequence)
        return slot

    def _fit_decode(self) -> tuple[list[Sequence], list[Sequence]]:
        keep = list(self.running)
        preempted: list[Sequence] = []
        while len(keep) > 1:
            need = sum(s.computed for s in keep) + sum(s.is_decoding for s in keep)
            stuck = not any(s.is_decoding for s in keep) and need >= self._kv_cells
            if need <= self._kv_cells and not stuck:
                break
            preempted.append(keep.pop())
        return keep, preempted

    def _admit(
        self, budget: int, cells: int, prefill: list[tuple[Sequence, int]]
    ) -> list[tuple[Sequence, int]]:
        """Admit from the head of the queue while a slot, budget and room for the whole prompt remain."""
        admitted: list[tuple[Sequence, int]] = []
        slots = list(self._free_slots)
        # Prompts admitted earlier still claim the cells that they have not computed yet.
        cells += sum(size for _, size in prefill)
        cells -= sum(len(s.tokens) - s.computed for s in self.running if not s.is_decoding)
        for sequence in self.waiting:
            if not slots or budget <= 0 or len(sequence.tokens) + 1 > cells:
                break
            size = min(len(sequence.tokens), budget)
            admitted.append((sequence, slots.pop()))
            prefill.append((sequence, size))
            budget -= size
            cells -= len(sequence.tokens) + 1
        return admitted

    @staticmethod
    def _decode_chunk(sequence: Sequence) -> Chunk:
        assert sequence.slot is not None
        return Chunk(sequence.slot, sequence.computed, sequence.tokens[-1:], wants_logits=True)

    @staticmethod
    def _prefill_call(prefill: list[tuple[Sequence, int]], admitted: dict[Sequence, int]) -> ModelCall:
        chunks = []
        for sequence, size in prefill:
            slot = sequence.slot if sequence.slot is not None else admitted[sequence]
            end = sequence.computed + size
            tokens = sequence.tokens[sequence.computed : end]
            chunks.append(Chunk(slot, sequence.computed, tokens, wants_logits=end == len(sequence.tokens)))
        return ModelCall(tuple(chunks))
