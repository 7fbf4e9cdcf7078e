"""Values of the thinking-budget contract: resolved limits, and what became of them (seed 001)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Trigger(StrEnum):
    """What made kiln close the thinking."""

    TOKENS = "tokens"
    TIME = "time"
    MAX_TOKENS = "max_tokens"


@dataclass(frozen=True, slots=True)
class Limit:
    """A resolved dimension: the limit (None = unlimited) and the source that decided it."""

    value: int | None
    source: str


@dataclass(frozen=True, slots=True)
class Budget:
    """Both resolved dimensions: tokens, and milliseconds of decode time."""

    tokens: Limit
    time_ms: Limit

    @property
    def configured(self) -> bool:
        return self.tokens.value is not None or self.time_ms.value is not None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened to an applied budget in one completion.

    `thinking_tokens` counts generated tokens before the close began; `thinking_time_ms` is whole
    milliseconds from the first decode candidate to the end of thinking. `interrupted` says the
    caller skipped the thinking: the record stays untriggered.
    """

    trigger: Trigger | None
    closed: bool
    thinking_tokens: int
    thinking_time_ms: int
    interrupted: bool = False
