"""Wire shapes of the thinking-budget contract v1 (seed 001)."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType


class ThinkingBudgetOutcome(Struct, kw_only=True):
    """Per-choice outcome of an applied budget; `trigger` is present exactly when triggered."""

    triggered: bool
    trigger: str | UnsetType = UNSET
    closed: bool
    thinking_tokens: int
    thinking_time_ms: int


class ThinkingBudgetRecord(Struct, kw_only=True):
    """Flat record of configuration and outcome. Absent limits are unlimited; nothing is ever null."""

    configured: bool
    applied: bool
    max_tokens: int | UnsetType = UNSET
    max_time_ms: int | UnsetType = UNSET
    tokens_source: str
    time_source: str
    triggered: bool
    trigger: str | UnsetType = UNSET
    closed: bool | UnsetType = UNSET
    thinking_tokens: int | UnsetType = UNSET
    thinking_time_ms: int | UnsetType = UNSET
