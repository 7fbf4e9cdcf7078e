"""The `/lmkit/v1` dialect: core values to named events and to the whole answer."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kiln.core.completion import TextDelta, TokenLogprob
from kiln.core.messages import Message
from kiln.core.native import (
    Alternative,
    ClientCall,
    NativeEvent,
    SkillUse,
    Status,
    Summary,
    ToolUse,
)
from kiln.core.tokens import FinishReason
from kiln.thinking.budget import to_record
from kiln.wire import lmkit as wire

_CHANNELS: dict[str, wire.Channel] = {"reasoning": "thinking", "content": "text", "tool": "tool"}


class EventEncoder:
    """Turns events into the bytes of named server-sent events. `many` alternatives carry their index."""

    def __init__(self, *, many: bool) -> None:
        self._many = many
        self._encode = msgspec.json.Encoder().encode

    def encode(self, events: Iterable[NativeEvent]) -> bytes:
        return b"".join(self._event(event) for event in events)

    def _event(self, event: NativeEvent) -> bytes:
        name, payload = self._named(event)
        return b"event: " + name + b"\ndata: " + self._encode(payload) + b"\n\n"

    def _named(self, event: NativeEvent) -> tuple[bytes, msgspec.Struct]:
        if isinstance(event, TextDelta):
            index = event.index if self._many else None
            return b"delta", wire.DeltaEvent(t=_CHANNELS[event.channel], d=event.text, i=index)
        if isinstance(event, Status):
            return b"status", _to_status(event)
        if isinstance(event, ClientCall):
            return b"tool_call", _to_call(event)
        if isinstance(event, ToolUse):
            return b"tool_use", _to_tool_use(event)
        if isinstance(event, SkillUse):
            return b"skill", _to_skill(event)
        return b"done", to_done(event)


def to_response(summary: Summary, events: Iterable[NativeEvent]) -> wire.NativeChatResponse:
    """The answer of an exchange that was not streamed; `events` are all that happened."""
    skills = [_to_skill(event) for event in events if isinstance(event, SkillUse)]
    tools = [_to_tool_use(event) for event in events if isinstance(event, ToolUse)]
    return wire.NativeChatResponse(
        result=to_done(summary),
        thinking=summary.alternatives[0].thinking or None,
        skill_events=skills or None,
        tool_events=tools or None,
    )


def to_done(summary: Summary) -> wire.DoneEvent:
    """The terminal summary. What is said once is said of alternative 0."""
    first = summary.alternatives[0]
    many = len(summary.alternatives) > 1
    return wire.DoneEvent(
        text=first.text,
        model=summary.model,
        tokens=summary.tokens,
        rate=round(summary.rate, 3),
        prompt_tokens=summary.prompt_tokens,
        prompt_secs=round(summary.prompt_seconds, 6),
        gen_secs=round(summary.seconds, 6),
        reason=_to_reason(first.reason),
        ctx=summary.context,
        ctx_max=summary.context_length,
        thinking_tokens=summary.thinking_tokens,
        cached_tokens=summary.cached_tokens,
        rounds=summary.rounds,
        thinking_budget=to_record(summary.budget, applied=summary.budget_applied, outcome=first.outcome),
        tool_calls=[_to_call(call) for call in summary.calls] or None,
        messages=[_to_message(message) for message in summary.messages] or None,
        logprobs=None if many else _to_logprobs(first),
        choices=[_to_alternative(summary, one) for one in summary.alternatives] if many else None,
    )


def _to_alternative(summary: Summary, one: Alternative) -> wire.Alternative:
    return wire.Alternative(
        index=one.index,
        text=one.text,
        tokens=one.tokens,
        reason=_to_reason(one.reason),
        thinking_budget=to_record(summary.budget, applied=summary.budget_applied, outcome=one.outcome),
        thinking=one.thinking or None,
        logprobs=_to_logprobs(one),
    )


def _to_reason(reason: FinishReason) -> wire.Reason:
    names: dict[FinishReason, wire.Reason] = {
        FinishReason.STOP: "stop",
        FinishReason.LENGTH: "length",
        FinishReason.TOOL_CALLS: "tool_calls",
    }
    return names.get(reason, "cancelled")


def _to_status(status: Status) -> wire.StatusEvent:
    pct = None
    if status.done is not None and status.total:
        pct = round(100 * status.done / status.total, 1)
    return wire.StatusEvent(phase=status.phase, pct=pct, done=status.done, total=status.total)


def _to_call(call: ClientCall) -> wire.ToolCallEvent:
    return wire.ToolCallEvent(id=call.id, name=call.name, arguments=call.arguments)


def _to_tool_use(use: ToolUse) -> wire.ToolUseEvent:
    return wire.ToolUseEvent(
        name=use.name,
        status=use.status,
        args=use.args,
        secs=None if use.seconds is None else round(use.seconds, 6),
        result=use.result,
        sources=None if use.sources is None else list(use.sources),
    )


def _to_skill(use: SkillUse) -> wire.SkillEvent:
    return wire.SkillEvent(name=use.name, status=use.status, context=use.context, resource=use.resource)


def _to_message(message: Message) -> wire.NativeMessage:
    """A message of the exchange, in the shape in which a request takes it."""
    calls = [
        wire.NativeCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in message.tool_calls or ()
    ]
    return wire.NativeMessage(
        role=message.role,  # type: ignore[arg-type]
        content=message.content,
        thinking=message.reasoning_content or None,
        tool_calls=calls or None,
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _to_logprobs(one: Alternative) -> list[wire.NativeLogprob] | None:
    if one.logprobs is None:
        return None
    return [_to_logprob(token) for token in one.logprobs]


def _to_logprob(token: TokenLogprob) -> wire.NativeLogprob:
    return wire.NativeLogprob(
        token=token.text.decode("utf-8", "replace"),
        id=token.token_id,
        logprob=token.logprob,
        bytes=list(token.text),
        top_logprobs=[
            wire.TopToken(token=text.decode("utf-8", "replace"), id=i, logprob=logprob, bytes=list(text))
            for i, text, logprob in token.top
        ],
    )
