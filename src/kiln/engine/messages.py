"""What crosses between the event loop and the engine's worker, in one process or between two."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from kiln.engine.ports import Delivery, EngineStats, GenerationRequest, StepTimes


class Submit(Struct, frozen=True, tag=True):
    """A new request. `submitted` is `time.monotonic()`, which all processes of a machine share."""

    key: int
    request: GenerationRequest
    submitted: float


class Cancel(Struct, frozen=True, tag=True):
    key: int


class CloseThinking(Struct, frozen=True, tag=True):
    key: int


Command = Submit | Cancel | CloseThinking


class StepReport(Struct, frozen=True, array_like=True):
    """What happened since the last report: deliveries by key, the keys that left the queue, counts."""

    deliveries: dict[int, Delivery]
    admitted: list[int]
    stats: EngineStats
    step: StepTimes


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """`parallel` sequences at once; prompt tokens a step, and while others decode; tokens retained;
    steps in a row for sequences with the same adapters; tokens drafted at once for a sequence.
    `host_bytes` of the host's memory keep prefixes that the cache gives up. With
    `checks_books` the KV book-keeping is compared with the model's cache whenever the worker is idle."""

    parallel: int
    step_tokens: int = 512
    stall_tokens: int = 128
    retain_tokens: int = 0
    turn_steps: int = 4
    draft_tokens: int = 0
    checks_books: bool = False
    host_bytes: int = 0
