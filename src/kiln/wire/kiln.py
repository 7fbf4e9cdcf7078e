"""Wire structs of the Kiln inference contract v1 (seed 000): chat completions.

Request objects accept and ignore unknown fields; response objects hold exactly the contract's
fields, absent ones left out. Bounds that msgspec cannot state (64-bit seeds, finite numbers, pairs
of fields) are checked in `dialects.kiln`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from kiln.wire.thinking import ThinkingBudgetOutcome, ThinkingBudgetRecord

NonNegative = Annotated[int, Meta(ge=0)]
Uint32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
FinishReasonName = Literal["stop", "length", "tool_calls", "error"]


class AdapterRef(Struct, kw_only=True):
    name: Annotated[str, Meta(min_length=1)]
    scale: float


class StreamOptions(Struct, kw_only=True):
    include_usage: bool = False


class ChatMessageInput(Struct, kw_only=True):
    role: str
    content: str | list[Any] | None = ""
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None
    name: str | None = None
    tool_call_id: str | None = None


class ChatCompletionRequest(Struct, kw_only=True):
    messages: list[ChatMessageInput]
    model: str | None = None
    n: int | None = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: Uint32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    sampling_preset: str | None = None
    max_tokens: NonNegative | None = None
    max_completion_tokens: NonNegative | None = None
    ignore_eos: bool = False
    thinking_budget_tokens: NonNegative | None | UnsetType = UNSET
    thinking_budget_ms: NonNegative | None | UnsetType = UNSET
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    adapter: str | None | UnsetType = UNSET
    adapters: list[AdapterRef] | None | UnsetType = UNSET
    tools: list[Any] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    fold_reasoning_into_content: bool | None = None
    include_performance: bool | None = None
    include_config_hashes: bool | None = None
    rollout_provenance: bool = False


class Usage(Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ConfigHashes(Struct, kw_only=True):
    tokenizer_config_hash: str | UnsetType = UNSET
    chat_template_hash: str | UnsetType = UNSET
    training_chat_template_hash: str | UnsetType = UNSET
    model_config_hash: str | UnsetType = UNSET
    effective_config_hash: str | UnsetType = UNSET


class ChatCompletionMetadata(Struct, kw_only=True):
    thinking_enabled: bool
    thinking_mode: Literal["reasoning", "non_reasoning"]
    thinking_source: Literal["custom", "request", "server_default", "template_default"]
    final_content_empty: bool
    reasoning_folded_into_content: bool
    thinking_budget: ThinkingBudgetRecord
    default_thinking_enabled: bool | UnsetType = UNSET
    content_empty_reason: (
        Literal["no_content", "reasoning_without_final_content", "tool_call"] | UnsetType
    ) = UNSET
    config_hashes: ConfigHashes | UnsetType = UNSET


class ChatMessageOutput(Struct, kw_only=True):
    role: str
    content: str
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[Any] | UnsetType = UNSET


class Choice(Struct, kw_only=True):
    index: int
    message: ChatMessageOutput
    finish_reason: FinishReasonName
    thinking_budget: ThinkingBudgetOutcome | UnsetType = UNSET


class ChatCompletionResponse(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    metadata: ChatCompletionMetadata


class Delta(Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[Any] | UnsetType = UNSET


class ChunkChoice(Struct, kw_only=True):
    index: int
    delta: Delta
    finish_reason: FinishReasonName | UnsetType = UNSET


class StreamingTerminalMetadata(Struct, kw_only=True):
    thinking_budget: ThinkingBudgetRecord


class ChatCompletionChunk(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    metadata: StreamingTerminalMetadata | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET
