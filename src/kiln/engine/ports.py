"""The port that the use cases talk to: an `Engine` streams requests.

Batching engines compute through the other port, `ModelRunner` (`runner.py`); a distributed engine would
implement this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct, structs

from kiln.core.budgets import Outcome
from kiln.core.errors import KilnError
from kiln.core.sampling import SamplingParams
from kiln.core.scoring import PositionScore
from kiln.core.tokens import FinishReason, TokenEvent
from kiln.thinking.gate import CloseSequence, GateLimits


@dataclass(frozen=True, slots=True)
class ThinkingSpec:
    """What the engine needs to gate a sequence that starts inside a reasoning block."""

    close: CloseSequence
    limits: GateLimits


@dataclass(frozen=True, slots=True)
class ScoreSpec:
    """Score every prompt token after the first; report the `top_k` most likely ones beside it."""

    top_k: int


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """A LoRA adapter: `path` of a GGUF file that never changes, and the factor of its delta."""

    path: str
    scale: float


AdapterSet = tuple[AdapterUse, ...]


def adapter_set(uses: Sequence[AdapterUse]) -> AdapterSet:
    """The sum that these uses mean, in one form: a path once, no zero scale, sorted by path."""
    scales: dict[str, float] = {}
    for use in uses:
        scales[use.path] = scales.get(use.path, 0.0) + use.scale
    return tuple(AdapterUse(path, scales[path]) for path in sorted(scales) if scales[path] != 0.0)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate.

    `prompt_ids` is not empty and shorter than the context; `max_tokens` >= 1 is already clamped so
    that prompt and completion fit the context. `eos_ids` end the sequence (empty: none do).
    Draws are keyed by (`seed`, `choice_index`, token index). An `exact` request gives the same ids and
    log-probabilities whoever else is running and whatever is cached. KV is shared within one `scope`
    (model and adapter revision) only. With `scores` the prompt is scored and nothing is generated.
    `cacheable` says that the request decides its tokens, so that an earlier answer may be given again.
    `logit_bias` adds to the raw logits of token ids. With `top_logprobs` every token carries its raw
    score and so many of the likeliest alternatives. `grammar` is an llguidance grammar that the tokens
    after the reasoning keep to. `adapters` are summed; `scope` must name their contents. A `narrated`
    request hears how much of its prompt has been read.
    """

    prompt_ids: Sequence[int]
    max_tokens: int
    sampling: SamplingParams
    seed: int
    choice_index: int = 0
    eos_ids: frozenset[int] = frozenset()
    thinking: ThinkingSpec | None = None
    exact: bool = False
    priority: bool = False
    scope: str = ""
    scores: ScoreSpec | None = None
    cacheable: bool = False
    logit_bias: dict[int, float] | None = None
    top_logprobs: int | None = None
    grammar: str | None = None
    adapters: tuple[AdapterUse, ...] = ()
    narrated: bool = False


@dataclass(frozen=True, slots=True)
class Timings:
    """`time.monotonic()` marks of one sequence, and the time that model calls with its rows took.

    All in seconds; a mark that is None has not happened. `received` is when the engine thread took the
    request from the event loop. `adapter_s` went into loading adapters and changing to its own before calls.
    """

    submitted: float
    received: float | None = None
    admitted: float | None = None
    first_token: float | None = None
    ended: float | None = None
    prefill_s: float = 0.0
    decode_s: float = 0.0
    sampling_s: float = 0.0
    adapter_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GenerationEnd:
    """How a sequence ended. `error` is set exactly when `reason` is ERROR.

    `outcome` is the gate's account; None when the sequence had no gate. `cached_tokens` of the prompt
    were taken from the prefix cache.
    """

    reason: FinishReason
    outcome: Outcome | None
    timings: Timings
    error: KilnError | None = None
    cached_tokens: int = 0


class StepTimes(Struct, frozen=True, array_like=True):
    """What one engine step spent its time on, in seconds, and when its results were handed over."""

    decode_s: float = 0.0
    prefill_s: float = 0.0
    sampling_s: float = 0.0
    handed: float = 0.0


_NO_STEP = StepTimes()


class Delivery(Struct, omit_defaults=True):
    """What one engine step produced for one sequence; `scores` in prompt order.

    `prompt_read` counts the prompt tokens in the KV cache so far, for narrated requests. A `replayed`
    delivery was computed for an earlier request; its tokens' times say nothing about the engine.
    `step` is shared by all deliveries of the step: it travels once, in their report.
    """

    tokens: list[TokenEvent] = []
    scores: list[PositionScore] = []
    end: GenerationEnd | None = None
    prompt_read: int | None = None
    replayed: bool = False
    step: StepTimes = _NO_STEP


class Generation(Protocol):
    """A running sequence. Iterate it on the event loop; the last delivery carries `end`."""

    @property
    def begun(self) -> float | None:
        """`time.monotonic()` when it was heard to have a place; None as long as it waits for one."""
        ...

    def __aiter__(self) -> Generation: ...

    async def __anext__(self) -> Delivery: ...

    def cancel(self, error: KilnError | None = None) -> None:
        """End at once for the reader, and within one step in the engine. Idempotent.

        Without an error it ends as CANCELLED.
        """
        ...

    def stop(self) -> None:
        """End within one step, with the gate's account: the reader has found a stop string."""
        ...

    def close_thinking(self) -> None:
        """Close the reasoning block at the next token; no effect once the answer began."""
        ...


class EngineStats(Struct, frozen=True, array_like=True):
    """Counts of the moment, and totals since the engine started. Made once a step."""

    running: int
    waiting: int
    kv_cells_used: int
    kv_cells: int
    steps: int
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    preemptions: int = 0
    adapter_switches: int = 0
    prompt_tokens_restored: int = 0
    tokens_drafted: int = 0
    drafts_accepted: int = 0
    restarts: int = 0

    def followed_by(self, later: EngineStats) -> EngineStats:
        """`later`, with the totals of this one's engine added to its own."""
        totals = {name: getattr(self, name) + getattr(later, name) for name in _TOTALS}
        return structs.replace(later, **totals)


_TOTALS = (
    "steps",
    "prompt_tokens_computed",
    "prompt_tokens_cached",
    "preemptions",
    "adapter_switches",
    "prompt_tokens_restored",
    "tokens_drafted",
    "drafts_accepted",
    "restarts",
)


class Engine(Protocol):
    """Streams requests. All methods are called on the event loop's thread."""

    context_length: int

    @property
    def is_alive(self) -> bool: ...

    @property
    def is_restarting(self) -> bool:
        """Whether the engine died and is coming up again: what is submitted waits for it."""
        ...

    @property
    def facts(self) -> Mapping[str, object]:
        """What the engine says about itself once it has started."""
        ...

    async def start(self) -> None: ...

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue a request. Raises QueueFull, or EngineFailed when the engine is gone."""
        ...

    @property
    def room(self) -> int:
        """How many requests may run and wait together when there are no others."""
        ...

    def ensure_room(self, count: int) -> None:
        """Raise QueueFull unless `count` more requests may wait."""
        ...

    def stats(self) -> EngineStats: ...

    async def stop(self) -> None: ...
