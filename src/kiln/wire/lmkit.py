"""The native chat of `/lmkit/v1` (seed 002): request bodies, event payloads, summaries.

A null stands for an absent field, except for the thinking budgets, where it says unlimited. Unknown
fields are ignored. Bounds that msgspec cannot state are checked in `dialects.lmkit`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from kiln.wire.thinking import ThinkingBudgetRecord

MAX_ALTERNATIVES = 8
MAX_TOP_LOGPROBS = 20
MAX_REQUEST_ID = 256
MAX_TOOLS = 128
MAX_INT32 = 2**31 - 1

Int32 = Annotated[int, Meta(ge=0, le=MAX_INT32)]
Uint32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Uint63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
RequestId = Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID)]
# Behind `$` Python would let a line break pass.
MemoryId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$(?!\n)")]
ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}$(?!\n)")]
Phase = Literal["downloading", "loading", "session", "prompt"]
Channel = Literal["thinking", "text", "tool"]
ToolStatus = Literal["running", "done", "error", "denied"]
SkillStatus = Literal["active", "missing", "activated", "resource"]
Reason = Literal["stop", "length", "tool_calls", "cancelled"]


class NativeFile(Struct, kw_only=True):
    """A file of a message: its `text`, or its bytes as base64 in `data`."""

    name: str
    mime: str | None = None
    text: str | None = None
    data: str | None = None


class NativeCall(Struct, kw_only=True):
    """A tool call. `arguments` is the JSON text of an object; in requests the object itself is taken too."""

    name: Name
    arguments: str | dict[str, Any]
    id: str | None = None


class NativeMessage(Struct, kw_only=True, omit_defaults=True):
    """One message. An assistant's `thinking` and `tool_calls` are those of an earlier exchange."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = ""
    images: list[str] | None = None
    files: list[NativeFile] | None = None
    thinking: str | None = None
    tool_calls: list[NativeCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class NativeTool(Struct, kw_only=True):
    """A tool that the client runs. `parameters` is the JSON Schema of its arguments."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolChoiceName(Struct, kw_only=True):
    name: Name


class NativeSchema(Struct, kw_only=True):
    schema: dict[str, Any] | bool
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NativeSchema | None = None


class NativeChatRequest(Struct, kw_only=True):
    """Body of `POST /lmkit/v1/chat`. `thinking_budget_tokens` and `thinking_budget_ms` are kiln's own."""

    messages: Annotated[list[NativeMessage], Meta(min_length=1)]
    model: str | None = None
    system: str | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Share | None = None
    top_k: Int32 | None = None
    min_p: Share | None = None
    seed: Uint32 | None = None
    max_tokens: Int32 | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_ALTERNATIVES)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    stop: list[str] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repeat_penalty: Annotated[float, Meta(gt=0)] | None = None
    reasoning: Literal["none", "low", "medium", "high"] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[NativeTool], Meta(max_length=MAX_TOOLS)] | None = None
    server_tools: Annotated[list[Name], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoiceName | None = None
    stream: bool | None = None
    request_id: RequestId | None = None
    skill: Name | None = None
    skills: list[Name] | None = None
    skill_inputs: dict[str, Any] | None = None
    memory: MemoryId | None = None
    memory_store: MemoryId | None = None
    agent: Name | None = None
    thinking_budget_tokens: Uint63 | None | UnsetType = UNSET
    thinking_budget_ms: Uint63 | None | UnsetType = UNSET


class SkipThinking(Struct, kw_only=True):
    """Body of `POST /lmkit/v1/chat/skip-thinking`."""

    request_id: str


# Event payloads.


class StatusEvent(Struct, kw_only=True, omit_defaults=True):
    """`done` of `total` are bytes while downloading, and tokens while the prompt is read."""

    phase: Phase
    pct: float | None = None
    done: int | None = None
    total: int | None = None


class DeltaEvent(Struct, kw_only=True, omit_defaults=True):
    """Generated text `d` of channel `t`; `i` is the alternative, there when n is above 1."""

    t: Channel
    d: str
    i: int | None = None


class SkillEvent(Struct, kw_only=True, omit_defaults=True):
    name: str
    status: SkillStatus
    context: str | None = None
    resource: str | None = None


class ToolCallEvent(Struct, kw_only=True):
    """A call for the client to run; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class ToolUseEvent(Struct, kw_only=True, omit_defaults=True):
    name: str
    status: ToolStatus
    args: dict[str, Any] | None = None
    secs: float | None = None
    result: str | None = None
    sources: list[dict[str, str]] | None = None


class NativeError(Struct, kw_only=True):
    error: str
    code: str


class TopToken(Struct, kw_only=True):
    token: str
    id: int
    logprob: float
    bytes: list[int]


class NativeLogprob(Struct, kw_only=True):
    """A generated token and the likeliest ones at its place, by their raw log-probabilities."""

    token: str
    id: int
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopToken]


class Alternative(Struct, kw_only=True, omit_defaults=True):
    """One of several completions."""

    index: int
    text: str
    tokens: int
    reason: Reason
    thinking_budget: ThinkingBudgetRecord
    thinking: str | None = None
    logprobs: list[NativeLogprob] | None = None


class DoneEvent(Struct, kw_only=True, omit_defaults=True):
    """The terminal summary. docs/native.md says what each number counts."""

    text: str
    model: str
    tokens: int
    rate: float
    prompt_tokens: int
    prompt_secs: float
    gen_secs: float
    reason: Reason
    ctx: int
    ctx_max: int
    thinking_tokens: int
    cached_tokens: int
    rounds: int
    thinking_budget: ThinkingBudgetRecord
    tool_calls: list[ToolCallEvent] | None = None
    messages: list[NativeMessage] | None = None
    logprobs: list[NativeLogprob] | None = None
    choices: list[Alternative] | None = None


class NativeChatResponse(Struct, kw_only=True, omit_defaults=True):
    """The answer when nothing is streamed."""

    result: DoneEvent
    thinking: str | None = None
    skill_events: list[SkillEvent] | None = None
    tool_events: list[ToolUseEvent] | None = None
