"""What the scheduler decides, as values: steps, admissions, calls, picks."""

from __future__ import annotations

from dataclasses import dataclass, field

from kiln.core.tokens import Source
from kiln.engine.ports import AdapterSet
from kiln.engine.runner import ModelCall
from kiln.engine.schedule.host import SavedPrefix
from kiln.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Admission:
    """A waiting sequence gets a slot, and the first `shared` tokens of `source` or `saved` if it has one."""

    sequence: Sequence
    slot: int
    source: int | None = None
    shared: int = 0
    saved: SavedPrefix | None = None


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """A model call and the sequences of its chunks, in order."""

    call: ModelCall
    rows: tuple[Sequence, ...]


@dataclass(slots=True)
class Step:
    """One turn of the loop. Calls run in order: decode, then prefill. With `collects` dead cells are freed.

    All calls use the adapters of `turn`; a step that only makes room says whose turn comes after it.
    `stuck` is a sequence that could have the whole cache to itself and still does not fit.
    """

    decode: list[PlannedCall] = field(default_factory=list)
    prefill: list[PlannedCall] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    stuck: Sequence | None = None
    collects: bool = False
    turn: AdapterSet | None = None

    @property
    def computes(self) -> bool:
        return bool(self.decode or self.prefill)


@dataclass(frozen=True, slots=True)
class Pick:
    """The token chosen for a sequence's next position."""

    token: int
    source: Source
    logprob: float | None


@dataclass(frozen=True, slots=True)
class Copy:
    """Let sequence `target` share the first `length` tokens of `source`."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Put a saved prefix into the empty sequence `target`, and keep its first `length` tokens."""

    saved: SavedPrefix
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Limits:
    """`running` sequences at once over `slots` resident ones (the rest retain prefixes).

    `step_tokens` prompt tokens a step at most, `stall_tokens` while others decode. `can_share` is
    False where the model's memory cannot be copied or cut. At most `retain_tokens` are kept for requests
    that have ended: attention walks over every cell in use, also over those that nobody reads.
    Groups of sequences with equal adapters take turns of `turn_steps` steps. Drafted tokens fill decode
    calls up to `draft_rows` rows in all; next to exact rows only if the model's `exact_drafts` are exact.
    """

    running: int
    slots: int
    kv_cells: int
    step_tokens: int
    stall_tokens: int
    max_rows: int
    can_share: bool = True
    retain_tokens: int = 2**31
    turn_steps: int = 4
    draft_rows: int = 0
    exact_drafts: bool = True
