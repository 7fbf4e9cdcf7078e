"""Making room in a full KV cache: what goes first, and who has to start again."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from kiln.engine.schedule.kv import KVLedger
from kiln.engine.schedule.plan import Step
from kiln.engine.schedule.prefix import PrefixCache
from kiln.engine.sequence import Sequence


def make_room(
    ledger: KVLedger,
    prefixes: PrefixCache,
    running: SequenceOf[Sequence],
    *,
    rows: SequenceOf[Sequence] = (),
    cells: int = 0,
    may_preempt: bool = True,
) -> Step | None:
    """A step that computes nothing and frees a cell for each of `rows` that stays, and `cells` more.

    Retained prefixes go first, the least recently used foremost, then running sequences, the youngest
    first. None if that is not enough: with `may_preempt`, what does not fit now never will.
    """
    step = Step()
    retained = [entry.slot for entry in prefixes.retained()]
    keep = list(running)
    while True:
        # Freed cells would break the order of exact sequences: they start again in the new order.
        restart = [s for s in keep if s.exact]
        slots = [*step.evicted, *(s.slot for s in (*step.preempted, *restart) if s.slot is not None)]
        need = cells + sum(1 for s in rows if s in keep and not s.exact)
        # Those that start again take back what they had, their next row included.
        need += sum(len(sequence.tokens) for sequence in restart)
        if ledger.free + ledger.dead + (ledger.would_free(slots) if slots else 0) >= need:
            # Preempted last is first in the queue: the oldest must come back first.
            step.preempted = [*step.preempted, *reversed(restart)]
            step.collects = True
            return step
        if retained:
            step.evicted.append(retained.pop(0))
        elif may_preempt and len(keep) > 1:
            step.preempted.append(keep.pop())
        else:
            return None
