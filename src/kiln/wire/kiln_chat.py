"""Chat completions of the Kiln contract (seed 000)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from kiln.wire.common import (
    ChoiceCount,
    ConfigHashes,
    FinishReasonName,
    GenerationFields,
    NonNegative,
    StreamOptions,
    Usage,
)
from kiln.wire.performance import ChatCompletionPerformanceMetadata
from kiln.wire.rollouts import RolloutProvenanceV1
from kiln.wire.thinking import ThinkingBudgetOutcome, ThinkingBudgetRecord

ChatId = Annotated[str, Meta(pattern="^chatcmpl-")]


class ChatMessageInput(Struct, kw_only=True):
    role: str
    content: str | list[Any] | None = ""
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None
    name: str | None = None
    tool_call_id: str | None = None


class ConversationFields(GenerationFields, kw_only=True):
    """What single and batch requests both have beside the messages."""

    n: ChoiceCount | None = 1
    sampling_preset: str | None = None
    max_completion_tokens: NonNegative | None = None
    ignore_eos: bool = False
    tools: list[Any] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatCompletionRequest(ConversationFields, kw_only=True):
    messages: list[ChatMessageInput]
    stream: bool = False
    stream_options: StreamOptions | None = None
    fold_reasoning_into_content: bool | None = None
    include_performance: bool | None = None
    include_config_hashes: bool | None = None
    rollout_provenance: bool = False


class ChatCompletionMetadata(Struct, kw_only=True, forbid_unknown_fields=True):
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
    performance: ChatCompletionPerformanceMetadata | UnsetType = UNSET


class ChatMessageOutput(Struct, kw_only=True, forbid_unknown_fields=True):
    role: str
    content: str
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[Any] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    tool_call_id: str | UnsetType = UNSET


class Choice(Struct, kw_only=True, forbid_unknown_fields=True):
    index: NonNegative
    message: ChatMessageOutput
    finish_reason: FinishReasonName
    thinking_budget: ThinkingBudgetOutcome | UnsetType = UNSET
    rollout_provenance: RolloutProvenanceV1 | UnsetType = UNSET


class ChatCompletionResponse(Struct, kw_only=True, forbid_unknown_fields=True):
    id: ChatId
    object: Literal["chat.completion"] = "chat.completion"
    created: NonNegative
    model: str
    choices: Annotated[list[Choice], Meta(min_length=1, max_length=64)]
    usage: Usage
    metadata: ChatCompletionMetadata


class Delta(Struct, kw_only=True, forbid_unknown_fields=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[Any] | UnsetType = UNSET


class ChunkChoice(Struct, kw_only=True, forbid_unknown_fields=True):
    index: NonNegative
    delta: Delta
    finish_reason: FinishReasonName | UnsetType = UNSET


class StreamingTerminalMetadata(Struct, kw_only=True, forbid_unknown_fields=True):
    thinking_budget: ThinkingBudgetRecord
    performance: ChatCompletionPerformanceMetadata | UnsetType = UNSET


class ChatCompletionChunk(Struct, kw_only=True, forbid_unknown_fields=True):
    id: ChatId
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: NonNegative
    model: str
    choices: list[ChunkChoice]
    metadata: StreamingTerminalMetadata | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET
