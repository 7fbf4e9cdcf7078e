"""Wire shapes of the thinking-budget contract v1 (seed 001)."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from kiln.wire.common import NonNegative

TRIGGERS = ("tokens", "time", "max_tokens")
SOURCES = (
    "unlimited",
    "server_default",
    "request",
    "request_unlimited",
    "suite",
    "suite_unlimited",
    "run_override",
    "run_override_unlimited",
    "example",
    "example_unlimited",
    "unknown",
)

# Texts to the type checker, since the core's values are texts; enumerations on the wire.
TriggerName = Annotated[
    str, Meta(pattern=f"^({'|'.join(TRIGGERS)})$", extra_json_schema={"enum": list(TRIGGERS)})
]
SourceName = Annotated[
    str, Meta(pattern=f"^({'|'.join(SOURCES)})$", extra_json_schema={"enum": list(SOURCES)})
]


class ThinkingBudgetConfigurationMetadata(Struct, kw_only=True, forbid_unknown_fields=True):
    """Both resolved limits and who decided them. Absent limits are unlimited; nothing is ever null."""

    configured: bool
    max_tokens: NonNegative | UnsetType = UNSET
    max_time_ms: NonNegative | UnsetType = UNSET
    tokens_source: SourceName
    time_source: SourceName


class ThinkingBudgetOutcome(Struct, kw_only=True, forbid_unknown_fields=True):
    """Per-choice outcome of an applied budget; `trigger` is present exactly when triggered."""

    triggered: bool
    trigger: TriggerName | UnsetType = UNSET
    closed: bool
    thinking_tokens: NonNegative
    thinking_time_ms: NonNegative


class ThinkingBudgetRecord(Struct, kw_only=True, forbid_unknown_fields=True):
    """Flat record of configuration and outcome. Absent limits are unlimited; nothing is ever null."""

    configured: bool
    applied: bool
    max_tokens: NonNegative | UnsetType = UNSET
    max_time_ms: NonNegative | UnsetType = UNSET
    tokens_source: SourceName
    time_source: SourceName
    triggered: bool
    trigger: TriggerName | UnsetType = UNSET
    closed: bool | UnsetType = UNSET
    thinking_tokens: NonNegative | UnsetType = UNSET
    thinking_time_ms: NonNegative | UnsetType = UNSET


class ThinkingBudgetRecentRecord(Struct, kw_only=True, forbid_unknown_fields=True):
    """The record of a recent request.

    `applied` is absent only when the request failed before that was known; the outcome's four fields
    (and `trigger`) are absent unless the budget applied and the completion got far enough to have one.
    """

    configured: bool
    applied: bool | UnsetType = UNSET
    max_tokens: NonNegative | UnsetType = UNSET
    max_time_ms: NonNegative | UnsetType = UNSET
    tokens_source: SourceName
    time_source: SourceName
    triggered: bool | UnsetType = UNSET
    trigger: TriggerName | UnsetType = UNSET
    closed: bool | UnsetType = UNSET
    thinking_tokens: NonNegative | UnsetType = UNSET
    thinking_time_ms: NonNegative | UnsetType = UNSET
