"""Batch generation and prompt scoring of the Kiln contract (seed 000)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from kiln.wire.common import FinishReasonName, NonNegative, Positive, Uint32, Usage
from kiln.wire.kiln_chat import ChatMessageInput, ConversationFields
from kiln.wire.thinking import ThinkingBudgetConfigurationMetadata, ThinkingBudgetOutcome

MAX_BATCH_OUTPUTS = 64
MAX_PROMPT_LOGPROBS = 256


class BatchCompletionRequest(ConversationFields, kw_only=True):
    """`len(prompts) * n` is at most 64."""

    prompts: Annotated[list[list[ChatMessageInput]], Meta(min_length=1, max_length=MAX_BATCH_OUTPUTS)]


class BatchCompletionItem(Struct, kw_only=True, forbid_unknown_fields=True):
    prompt_index: NonNegative
    completion_index: NonNegative
    text: str
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[Any] | UnsetType = UNSET
    finish_reason: FinishReasonName
    thinking_budget: ThinkingBudgetOutcome | UnsetType = UNSET
    usage: Usage


class BatchCompletionMetadata(Struct, kw_only=True, forbid_unknown_fields=True):
    thinking_budget: ThinkingBudgetConfigurationMetadata


class BatchCompletionResponse(Struct, kw_only=True, forbid_unknown_fields=True):
    id: Annotated[str, Meta(pattern="^batchcmpl-")]
    object: Literal["batch.completion"] = "batch.completion"
    created: NonNegative
    model: str
    completions: Annotated[list[BatchCompletionItem], Meta(min_length=1, max_length=MAX_BATCH_OUTPUTS)]
    usage: Usage
    metadata: BatchCompletionMetadata


class TextCompletionRequest(Struct, kw_only=True):
    """Scores a prompt; generates nothing. `stream` must be false, which the dialect checks."""

    prompt: str | list[Uint32]
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_PROMPT_LOGPROBS)]
    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=1)] | None = 1
    n: Literal[1] | None = 1
    stream: Annotated[bool, Meta(extra_json_schema={"const": False})] = False
    add_special_tokens: bool = True


class PromptLogprobEntry(Struct, kw_only=True, forbid_unknown_fields=True):
    """`logprob` is a natural logarithm, `rank` counts from 1 over the whole vocabulary."""

    logprob: float
    rank: Positive
    decoded_token: str


# Keys are token ids in decimal.
PromptLogprobMap = dict[Annotated[str, Meta(pattern="^[0-9]+$")], PromptLogprobEntry]


class TextCompletionChoice(Struct, kw_only=True, forbid_unknown_fields=True):
    """`prompt_logprobs` is as long as the prompt; its first entry is null."""

    index: NonNegative
    text: str
    finish_reason: FinishReasonName
    prompt_logprobs: list[PromptLogprobMap | None] | UnsetType = UNSET


class TextCompletionResponse(Struct, kw_only=True, forbid_unknown_fields=True):
    id: Annotated[str, Meta(pattern="^cmpl-")]
    object: Literal["text_completion"] = "text_completion"
    created: NonNegative
    model: str
    system_fingerprint: str | None
    choices: Annotated[list[TextCompletionChoice], Meta(min_length=1, max_length=1)]
    usage: Usage
