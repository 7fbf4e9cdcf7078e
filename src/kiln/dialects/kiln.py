"""The `/v1` dialect: chat requests of the Kiln inference contract v1, checked and turned into core values."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from kiln.adapters.names import check_name
from kiln.core.errors import InvalidField
from kiln.core.messages import Conversation, Message
from kiln.core.sampling import MAX_SEED, SamplingOverrides
from kiln.core.turn import ChatTurn
from kiln.dialects.validate import decode, require_finite, require_range, text_list
from kiln.text.template import content_text
from kiln.wire import kiln as wire
from kiln.wire.common import GenerationFields
from kiln.wire.kiln_chat import ConversationFields

MAX_CHOICES = 64
MAX_STOPS = 256
MAX_STOP_BYTES = 16384
MAX_RECORDED_ARGUMENTS = 255  # one more may be kiln's own enable_thinking
MAX_RECORDED_BYTES = 1_048_000


def decode_chat(body: bytes) -> wire.ChatCompletionRequest:
    """Decode and check a request body. Every refusal names the field."""
    request = decode(body, wire.ChatCompletionRequest)
    check_common(request)
    if request.stream and (request.n or 1) > 1:
        raise InvalidField("n above 1 needs stream=false", param="n", hint="Send n=1, or do not stream.")
    if isinstance(request.adapters, list) and request.adapter is not UNSET:
        raise InvalidField("adapter and adapters exclude each other", param="adapters")
    check_adapters(request)
    if request.rollout_provenance:
        _check_provenance(request)
    return request


def to_turn(request: wire.ChatCompletionRequest, *, performance: bool = False) -> ChatTurn:
    """The core value of a checked request. `performance` says whether its latency will be reported."""
    return build_turn(
        request,
        request.messages,
        "messages",
        provenance=request.rollout_provenance,
        measured=performance,
    )


def build_turn(
    request: ConversationFields,
    messages: list[wire.ChatMessageInput],
    where: str,
    *,
    provenance: bool = False,
    measured: bool = False,
) -> ChatTurn:
    """A turn from the fields that chat and batch requests share, and one conversation named `where`."""
    field = "max_tokens"
    if request.max_tokens is None and request.max_completion_tokens is not None:
        field = "max_completion_tokens"
    limit = getattr(request, field)
    return ChatTurn(
        conversation=Conversation(
            messages=tuple(_to_message(m, f"{where}[{i}]") for i, m in enumerate(messages)),
            tools=tuple(request.tools or ()),
            tool_choice=request.tool_choice,
            template_kwargs=request.chat_template_kwargs or {},
        ),
        model=request.model,
        sampling=SamplingOverrides.of(request),
        sampling_preset=request.sampling_preset,
        max_tokens=limit,
        max_tokens_field=field,
        ignore_eos=request.ignore_eos,
        budget_tokens=request.thinking_budget_tokens,
        budget_ms=request.thinking_budget_ms,
        stop=to_stops(request.stop),
        seed=request.seed,
        n=request.n if request.n is not None else 1,
        provenance=provenance,
        measured=measured,
        adapters=adapters_of(request),
        adapters_field="adapters" if isinstance(request.adapters, list) else "adapter",
    )


def _to_message(message: wire.ChatMessageInput, where: str) -> Message:
    try:
        content = content_text(message.content)
    except InvalidField as error:
        raise InvalidField(error.message, param=f"{where}.content") from None
    return Message(
        role=message.role,
        content=content,
        reasoning_content=message.reasoning_content,
        tool_calls=tuple(message.tool_calls) if message.tool_calls is not None else None,
        name=message.name,
        tool_call_id=message.tool_call_id,
    )


def to_stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = text_list("stop", stop)
    if any(text == "" for text in stops):
        raise InvalidField("stop must not hold an empty string", param="stop")
    if len(stops) > MAX_STOPS or sum(len(text.encode()) for text in stops) > MAX_STOP_BYTES:
        raise InvalidField(
            f"stop holds at most {MAX_STOPS} strings of {MAX_STOP_BYTES} bytes in all", param="stop"
        )
    return stops


def _check_provenance(request: wire.ChatCompletionRequest) -> None:
    """What a rollout with provenance excludes: its record has no place for it."""
    refused = {
        "stream": request.stream,
        "n": (request.n or 1) > 1,
        "ignore_eos": request.ignore_eos,
        "tools": bool(request.tools),
        "tool_choice": request.tool_choice is not None,
        "max_tokens": request.max_tokens == 0,
        "chat_template_kwargs": not _fits_record(request.chat_template_kwargs or {}),
    }
    for name, wrong in refused.items():
        if wrong:
            raise InvalidField(
                f"rollout_provenance excludes this value of {name}",
                param=name,
                hint="A rollout is one non-streaming choice, without tools or ignore_eos.",
            )


def _fits_record(arguments: dict[str, Any]) -> bool:
    """Whether template arguments fit the place that a rollout's record has for them."""
    if len(arguments) > MAX_RECORDED_ARGUMENTS:
        return False
    return len(msgspec.json.encode({"template_kwargs": arguments})) <= MAX_RECORDED_BYTES


def check_common(request: ConversationFields) -> None:
    """Bounds of the fields that chat and batch requests share."""
    require_finite(
        temperature=request.temperature,
        top_p=request.top_p,
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
    )
    require_range("seed", request.seed, 0, MAX_SEED)
    require_range("n", request.n, 1, MAX_CHOICES)
    for name in ("max_tokens", "max_completion_tokens", "thinking_budget_tokens", "thinking_budget_ms"):
        value = getattr(request, name)
        if isinstance(value, int):
            require_range(name, value, 0, MAX_SEED)


def check_adapters(request: GenerationFields) -> None:
    """Names that no adapter can have are refused here, unknown ones where the adapters are looked up."""
    if isinstance(request.adapters, list):
        for i, reference in enumerate(request.adapters):
            check_name(reference.name, f"adapters[{i}].name")
            require_finite(**{f"adapters[{i}].scale": reference.scale})
    if isinstance(request.adapter, str) and request.adapter:
        check_name(request.adapter, "adapter")


def adapters_of(request: GenerationFields) -> tuple[tuple[str, float], ...] | UnsetType:
    """Names and scales; UNSET where the request leaves the choice to the server."""
    if isinstance(request.adapters, list):
        return tuple((reference.name, reference.scale) for reference in request.adapters)
    if isinstance(request.adapter, UnsetType):
        return UNSET
    return ((request.adapter, 1.0),) if request.adapter else ()
