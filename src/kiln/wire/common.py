"""Scalar types, small objects and fields that several definitions of the Kiln contract (seed 000) share,
and the requests of the OpenAI-compatible profile with them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

MAX_UINT32 = 2**32 - 1
MAX_UINT64 = 2**64 - 1

NonNegative = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Uint32 = Annotated[int, Meta(ge=0, le=MAX_UINT32)]
# msgspec states no bound above 2**63 - 1: the upper one is in the schema and checked in `dialects`.
Uint64 = Annotated[int, Meta(ge=0, extra_json_schema={"maximum": MAX_UINT64})]
ChoiceCount = Annotated[int, Meta(ge=1, le=64)]
Milliseconds = Annotated[float, Meta(ge=0)]
NonNegativeNumber = Annotated[float, Meta(ge=0)]
Sha256 = Annotated[str, Meta(pattern="^sha256:[0-9a-f]{64}$")]
FinishReasonName = Literal["stop", "length", "tool_calls", "error"]


class Usage(Struct, kw_only=True, forbid_unknown_fields=True):
    """Token counts; `total_tokens` is the sum of the other two."""

    prompt_tokens: NonNegative
    completion_tokens: NonNegative
    total_tokens: NonNegative


class ConfigHashes(Struct, kw_only=True, forbid_unknown_fields=True):
    tokenizer_config_hash: Sha256 | UnsetType = UNSET
    chat_template_hash: Sha256 | UnsetType = UNSET
    training_chat_template_hash: Sha256 | UnsetType = UNSET
    model_config_hash: Sha256 | UnsetType = UNSET
    effective_config_hash: Sha256 | UnsetType = UNSET


class AdapterRef(Struct, kw_only=True):
    name: Annotated[str, Meta(min_length=1)]
    scale: float


class StreamOptions(Struct, kw_only=True):
    include_usage: bool = False


class GenerationFields(Struct, kw_only=True):
    """What every request under `/v1` that generates may set."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Uint32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: NonNegative | None = None
    thinking_budget_tokens: NonNegative | None | UnsetType = UNSET
    thinking_budget_ms: NonNegative | None | UnsetType = UNSET
    stop: str | list[str] | None = None
    seed: Uint64 | None = None
    adapter: str | None | UnsetType = UNSET
    adapters: list[AdapterRef] | None | UnsetType = UNSET
