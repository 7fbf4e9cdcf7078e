"""A chat request of the OpenAI profile, decoded, checked and turned into a core value."""

from __future__ import annotations

from dataclasses import dataclass

from kiln.core.errors import InvalidField
from kiln.core.messages import Conversation
from kiln.core.turn import AnswerFormat, ChatTurn, ToolPolicy
from kiln.dialects.openai.constraints import refuse_foreign
from kiln.dialects.openai.messages import read_messages, read_policy, read_tools
from kiln.dialects.openai.sampling import (
    check_limits,
    check_stream,
    named_tier,
    read_adapters,
    read_bias,
    read_sampling,
    read_stops,
    read_tier,
)
from kiln.dialects.openai.thinking import Efforts, ThinkingWish, read_thinking
from kiln.dialects.validate import decode, require_range
from kiln.wire import openai_chat as wire

MAX_TOP_LOGPROBS = 20
MAX_METADATA = (16, 64, 512)  # pairs, characters of a key, characters of a value

_REFUSED = {
    "functions": "Send tools.",
    "function_call": "Send tool_choice.",
    "audio": "This model writes text.",
    "prediction": "Leave it out; the answer is the same without it.",
    "web_search_options": "Offer a search tool instead.",
    "verbosity": "Say in the messages how long the answer may be.",
}


@dataclass(frozen=True, slots=True)
class ChatReply:
    """How the answer is to be shaped. `tier` is echoed where the request named one."""

    stream: bool
    include_usage: bool
    tier: wire.Tier | None
    exclude_reasoning: bool


def decode_request(body: bytes) -> wire.ChatRequest:
    """Decode and check a request body. Every refusal names the field."""
    request = decode(body, wire.ChatRequest)
    refuse_foreign(request)
    _refuse_unsupported(request)
    if request.top_logprobs is not None:
        require_range("top_logprobs", request.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if not request.logprobs:
            raise InvalidField("top_logprobs needs logprobs=true", param="top_logprobs")
    if request.logprobs and request.reasoning is not None and request.reasoning.exclude:
        raise InvalidField(
            "reasoning.exclude goes without logprobs, which would spell the reasoning out", param="logprobs"
        )
    check_stream(request)
    _check_metadata(request.metadata)
    reasoning = request.reasoning
    check_limits(
        max_tokens=request.max_tokens,
        max_completion_tokens=request.max_completion_tokens,
        thinking_budget_tokens=request.thinking_budget_tokens,
        thinking_budget_ms=request.thinking_budget_ms,
        **{"reasoning.max_tokens": reasoning.max_tokens if reasoning is not None else None},
    )
    return request


def to_reply(request: wire.ChatRequest) -> ChatReply:
    stream = request.stream is True
    options = request.stream_options
    return ChatReply(
        stream=stream,
        include_usage=options is not None and options.include_usage,
        tier=named_tier(request),
        exclude_reasoning=request.reasoning is not None and request.reasoning.exclude,
    )


def to_turn(request: wire.ChatRequest, efforts: Efforts) -> ChatTurn:
    """The core value of a checked request."""
    thinking = read_thinking(request, efforts)
    policy = read_policy(request)
    tools = read_tools(request.tools)
    adapters, adapters_field = read_adapters(request)
    field = "max_completion_tokens" if request.max_completion_tokens is not None else "max_tokens"
    return ChatTurn(
        conversation=Conversation(
            messages=read_messages(request.messages),
            # Tools that must not be called are not shown to the model at all.
            tools=tools if policy is not None and policy.mode != "none" else (),
            tool_choice=_template_choice(policy),
            template_kwargs=_template_arguments(request, thinking),
        ),
        model=request.model,
        sampling=read_sampling(request),
        max_tokens=getattr(request, field),
        max_tokens_field=field,
        ignore_eos=request.ignore_eos is True,
        budget_tokens=thinking.budget_tokens,
        budget_ms=thinking.budget_ms,
        stop=read_stops(request),
        seed=request.seed,
        n=request.n if request.n is not None else 1,
        logit_bias=read_bias(request),
        top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        answer_format=_answer_format(request.response_format),
        tool_policy=policy,
        adapters=adapters,
        adapters_field=adapters_field,
        priority=read_tier(request.service_tier),
    )


def _template_choice(policy: ToolPolicy | None) -> object:
    if policy is None or policy.mode == "none":
        return None
    if policy.mode == "named":
        return {"type": "function", "function": {"name": policy.name}}
    return policy.mode


def _template_arguments(request: wire.ChatRequest, thinking: ThinkingWish) -> dict[str, object]:
    arguments: dict[str, object] = dict(request.chat_template_kwargs or {})
    if thinking.enabled is not None:
        arguments["enable_thinking"] = thinking.enabled
    if thinking.effort not in (None, "none"):
        arguments.setdefault("reasoning_effort", thinking.effort)
    return arguments


def _answer_format(wanted: wire.ResponseFormat | None) -> AnswerFormat | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return AnswerFormat("json_object")
    described = wanted.json_schema
    if described is None:
        raise InvalidField("`response_format.json_schema` is required", param="response_format.json_schema")
    if not isinstance(described.schema, dict | bool):
        raise InvalidField(
            "`response_format.json_schema.schema` is required", param="response_format.json_schema.schema"
        )
    return AnswerFormat(
        "json_schema",
        described.schema,
        strict=described.strict is True,
        param="response_format.json_schema.schema",
    )


def _refuse_unsupported(request: wire.ChatRequest) -> None:
    for name, hint in _REFUSED.items():
        if getattr(request, name) is not None:
            raise InvalidField(f"{name} is not supported", param=name, hint=hint)
    if request.store:
        raise InvalidField("completions are not stored here", param="store", hint="Send store=false.")
    if request.modalities not in (None, ["text"]):
        raise InvalidField('modalities must be ["text"]', param="modalities")


def _check_metadata(metadata: dict[str, str] | None) -> None:
    pairs, key_size, value_size = MAX_METADATA
    if metadata is None:
        return
    if len(metadata) > pairs or any(
        len(key) > key_size or len(value) > value_size for key, value in metadata.items()
    ):
        raise InvalidField(
            f"metadata holds at most {pairs} pairs, with keys of {key_size} and values of {value_size}"
            " characters",
            param="metadata",
        )
