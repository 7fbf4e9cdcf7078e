"""Chat completions of the OpenAI-compatible profile. The stream chunk follows seed 004.

Requests ignore unknown fields. Fields that kiln cannot honour are declared as UNSET-or-anything and
refused by name in `dialects`. Nothing in a response is null: what does not apply is absent.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from kiln.wire.common import ChoiceCount, GenerationFields, NonNegative, StreamOptions

Effort = Literal["none", "minimal", "low", "medium", "high"]
Tier = Literal["default", "priority"]
FinishName = Literal["stop", "length", "tool_calls", "content_filter", "malformed_function_call"]
# What a field may hold that is refused whatever it holds.
Refused = Any


class Reasoning(Struct, kw_only=True):
    """`effort` and `max_tokens` exclude each other. `exclude` keeps the reasoning out of the answer."""

    effort: Effort | None = None
    max_tokens: NonNegative | None = None
    enabled: bool | None = None
    exclude: bool = False


class JsonSchemaFormat(Struct, kw_only=True):
    name: str
    schema: dict[str, Any] | bool | UnsetType = UNSET
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class FunctionDefinition(Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, kw_only=True):
    type: str
    function: FunctionDefinition | None = None


class NamedFunction(Struct, kw_only=True):
    name: str


class NamedChoice(Struct, kw_only=True):
    type: Literal["function"]
    function: NamedFunction


class Message(Struct, kw_only=True):
    role: str
    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    function_call: Refused = None
    audio: Refused = None


class ProfileFields(GenerationFields, kw_only=True):
    """What chat and text completions both have beside the prompt.

    The refused ones are those by which other servers constrain an answer: without them it is another answer.
    """

    n: ChoiceCount | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    service_tier: str | None = None
    user: str | None = None
    guided_json: Refused = None
    guided_regex: Refused = None
    guided_choice: Refused = None
    guided_grammar: Refused = None
    structured_outputs: Refused = None
    structural_tag: Refused = None
    json_schema: Refused = None
    grammar: Refused = None
    ebnf: Refused = None
    regex: Refused = None
    allowed_token_ids: Refused = None
    bad_words: Refused = None


class ChatRequest(ProfileFields, kw_only=True):
    messages: list[Message]
    max_completion_tokens: NonNegative | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    functions: Refused = None
    function_call: Refused = None
    modalities: Refused = None
    audio: Refused = None
    prediction: Refused = None
    web_search_options: Refused = None
    verbosity: Refused = None


class TopLogprob(Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(Struct, kw_only=True):
    content: list[TokenLogprob]


class PromptDetails(Struct, kw_only=True):
    cached_tokens: NonNegative
    cache_write_tokens: NonNegative


class CompletionDetails(Struct, kw_only=True):
    reasoning_tokens: NonNegative


class BudgetReport(Struct, kw_only=True):
    """What became of the thinking budget of choice 0. Times are left out: equal requests give equal usage."""

    applied: bool
    max_tokens: NonNegative | UnsetType = UNSET
    max_time_ms: NonNegative | UnsetType = UNSET
    tokens_source: str
    time_source: str
    triggered: bool
    trigger: str | UnsetType = UNSET
    closed: bool | UnsetType = UNSET
    thinking_tokens: NonNegative | UnsetType = UNSET


class Usage(Struct, kw_only=True):
    prompt_tokens: NonNegative
    completion_tokens: NonNegative
    total_tokens: NonNegative
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    estimated_cost: float | UnsetType = UNSET
    thinking_budget: BudgetReport | UnsetType = UNSET


class FunctionCall(Struct, kw_only=True):
    name: str
    arguments: str


class ToolCall(Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class MessageOutput(Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Choice(Struct, kw_only=True):
    index: NonNegative
    message: MessageOutput
    logprobs: ChoiceLogprobs | UnsetType = UNSET
    finish_reason: FinishName


class ChatResponse(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: NonNegative
    model: str
    choices: list[Choice]
    usage: Usage
    service_tier: Tier | UnsetType = UNSET


class FunctionDelta(Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(Struct, kw_only=True):
    """The first of a call has its id, type and name; the arguments come in pieces of one JSON text."""

    index: NonNegative
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class Delta(Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(Struct, kw_only=True):
    index: NonNegative
    delta: Delta
    logprobs: ChoiceLogprobs | UnsetType = UNSET
    finish_reason: FinishName | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: NonNegative
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType = UNSET
    service_tier: Tier | UnsetType = UNSET
