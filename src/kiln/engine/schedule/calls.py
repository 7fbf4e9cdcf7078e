"""From sequences to model calls: decode rows together, exact prompt chunks in small calls of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf

from kiln.engine.runner import Chunk, LogitsWanted, ModelCall
from kiln.engine.schedule.plan import Admission, PlannedCall
from kiln.engine.sequence import Sequence

# Calls of at most so many rows go through the kernels that decoding uses (ARCHITECTURE.md, exactness).
EXACT_ROWS = 63

# Admissions of the step by the id() of their sequence: a sequence just admitted has no slot yet.
Admitted = Mapping[int, Admission]


def decode_calls(decoding: SequenceOf[tuple[Sequence, list[int]]], max_rows: int) -> list[PlannedCall]:
    """Calls of decode rows only, each sequence's draft behind its row. All use one set of adapters."""
    calls: list[list[tuple[Sequence, list[int]]]] = []
    rows = most = min(EXACT_ROWS, max_rows)
    for sequence, draft in decoding:
        rows += 1 + len(draft)
        if rows > most:
            calls.append([])
            rows = 1 + len(draft)
        calls[-1].append((sequence, draft))
    return [_decode_call(pairs) for pairs in calls]


def _decode_call(pairs: list[tuple[Sequence, list[int]]]) -> PlannedCall:
    chunks = []
    for sequence, draft in pairs:
        assert sequence.slot is not None
        row = [sequence.tokens[-1], *draft]
        chunks.append(Chunk(sequence.slot, sequence.computed, row, "all" if draft else "last"))
    sequences = tuple(sequence for sequence, _ in pairs)
    exact = any(sequence.exact for sequence in sequences)
    return PlannedCall(ModelCall(tuple(chunks), exact=exact, adapters=sequences[0].adapters), sequences)


def prefill_calls(chunks: SequenceOf[tuple[Sequence, int]], admitted: Admitted) -> list[PlannedCall]:
    """One call for all ordinary chunks; exact chunks in small calls of their own."""
    calls = []
    ordinary = [(s, size) for s, size in chunks if not s.exact]
    if ordinary:
        calls.append(_call(ordinary, admitted))
    for sequence, size in chunks:
        if sequence.exact:
            calls.extend(_exact_calls(sequence, size, admitted))
    return calls


def _exact_calls(sequence: Sequence, size: int, admitted: Admitted) -> Iterator[PlannedCall]:
    start = _start(sequence, admitted)
    for at in range(start, start + size, EXACT_ROWS):
        rows = min(EXACT_ROWS, start + size - at)
        chunk = _chunk(sequence, at, rows, admitted)
        yield PlannedCall(ModelCall((chunk,), exact=True, adapters=sequence.adapters), (sequence,))


def _call(chunks: list[tuple[Sequence, int]], admitted: Admitted) -> PlannedCall:
    built = tuple(_chunk(s, _start(s, admitted), size, admitted) for s, size in chunks)
    sequences = tuple(s for s, _ in chunks)
    exact = any(sequence.exact for sequence in sequences)
    return PlannedCall(ModelCall(built, exact=exact, adapters=sequences[0].adapters), sequences)


def _start(sequence: Sequence, admitted: Admitted) -> int:
    admission = admitted.get(id(sequence))
    return sequence.computed if admission is None else admission.shared


def _chunk(sequence: Sequence, start: int, size: int, admitted: Admitted) -> Chunk:
    admission = admitted.get(id(sequence))
    slot = sequence.slot if admission is None else admission.slot
    assert slot is not None
    last = start + size == len(sequence.tokens)
    wanted: LogitsWanted = "all" if sequence.wants_scores else "last" if last else "none"
    return Chunk(slot, start, sequence.tokens[start : start + size], wanted)
