"""One chat request as the use cases understand it, whatever dialect it came in."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from kiln.core.messages import Conversation
from kiln.core.sampling import SamplingOverrides


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """What to answer and how.

    Budget overrides have three states: UNSET = inherit, None = unlimited, an integer = that limit.
    `max_tokens` None = the configured default. `max_tokens_field` is the
    request field it came from. `seed` None = the runtime chooses. With `provenance`
    the completion is computed exactly and comes with its rollout; a `measured` one reports its latency.
    """

    conversation: Conversation
    model: str | None = None
    sampling: SamplingOverrides = SamplingOverrides()
    sampling_preset: str | None = None
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    ignore_eos: bool = False
    budget_tokens: int | None | UnsetType = UNSET
    budget_ms: int | None | UnsetType = UNSET
    stop: tuple[str, ...] = ()
    seed: int | None = None
    n: int = 1
    provenance: bool = False
    measured: bool = False
