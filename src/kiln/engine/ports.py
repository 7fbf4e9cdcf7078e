"""The two ports of the engine room.

`Engine` is what the use cases talk to (stream a request); `ModelRunner` is what the batching loop
drives (run one model call). A distributed engine implements `Engine`; a local backend implements
`ModelRunner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kiln.core.budgets import Outcome
from kiln.core.errors import KilnError
from kiln.core.sampling import SamplingParams
from kiln.core.tokens import FinishReason, TokenEvent
from kiln.thinking.gate import CloseSequence, GateLimits


@dataclass(frozen=True, slots=True)
class ThinkingSpec:
    """What the engine needs to gate a sequence that starts inside a reasoning block."""

    close: CloseSequence
    limits: GateLimits


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate.

    `prompt_ids` is not empty and shorter than the context; `max_tokens` >= 1 is already clamped so
    that prompt and completion fit the context. `eos_ids` end the sequence (empty: none do).
    Draws are keyed by (`seed`, `choice_index`, token index).
    """

    prompt_ids: Sequence[int]
    max_tokens: int
    sampling: SamplingParams
    seed: int
    choice_index: int = 0
    eos_ids: frozenset[int] = frozenset()
    thinking: ThinkingSpec | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """`time.monotonic()` marks of one sequence, in seconds; None = has not happened."""

    submitted: float
    admitted: float | None = None
    first_token: float | None = None
    ended: float | None = None


@dataclass(frozen=True, slots=True)
class GenerationEnd:
    """How a sequence ended. `error` is set exactly when `reason` is ERROR.

    `outcome` is the gate's account; None when the sequence had no gate.
    """

    reason: FinishReason
    outcome: Outcome | None
    timings: Timings
    error: KilnError | None = None


@dataclass(slots=True)
class Delivery:
    """What one engine step produced for one sequence."""

    tokens: list[TokenEvent] = field(default_factory=list)
    end: GenerationEnd | None = None


class Generation(Protocol):
    """A running sequence. Iterate it on the event loop; the last delivery carries `end`."""

    def __aiter__(self) -> Generation: ...

    async def __anext__(self) -> Delivery: ...

    def cancel(self, error: KilnError | None = None) -> None:
        """End the sequence within one step. Without an error it ends as CANCELLED. Idempotent."""
        ...

    def close_thinking(self) -> None:
        """Close the reasoning block at the next token; no effect once the answer began."""
        ...


@dataclass(frozen=True, slots=True)
class EngineStats:
    running: int
    waiting: int
    kv_cells_used: int
    kv_cells: int
    steps: int


class Engine(Protocol):
    """Streams requests. All methods are called on the event loop's thread."""

    context_length: int

    @property
    def is_alive(self) -> bool: ...

    async def start(self) -> None: ...

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue a request. Raises QueueFull, or EngineFailed when the engine is gone."""
        ...

    def ensure_room(self, count: int) -> None:
        """Raise QueueFull unless `count` more requests may wait."""
        ...

    def stats(self) -> EngineStats: ...

    async def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence: `tokens` go to positions `start`, `start + 1`, ...

    `wants_logits` asks for the logits of the last one.
    """

    sequence: int
    start: int
    tokens: Sequence[int]
    wants_logits: bool


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One call of the model: either one-token decode chunks or prefill chunks, never both."""

    chunks: tuple[Chunk, ...]

    @property
    def rows(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)


class KVExhausted(Exception):
    """The KV cache has no place for a call; nothing was computed."""


class ModelRunner(Protocol):
    """Runs model calls. Owned by one thread; every method is called on it.

    `sequences` is how many sequences may be resident, `kv_cells` how many tokens in all,
    `max_rows` the most rows one call may have.
    """

    n_vocab: int
    sequences: int
    kv_cells: int
    max_rows: int

    def execute(self, call: ModelCall) -> NDArray[np.float32]:
        """Run a call. Returns logits, shape (chunks that want them, n_vocab), in chunk order.

        The array is a view that the next call overwrites. Raises KVExhausted if the cache is full,
        EngineFailed if the native library reports an error.
        """
        ...

    def drop(self, sequence: int) -> None:
        """Forget all KV entries of a sequence."""
        ...

    def close(self) -> None:
        """Free native memory. The runner is unusable afterwards."""
        ...
