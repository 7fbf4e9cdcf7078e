"""A finished exchange as a chat completion."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET

from kiln.core.completion import ChoiceEnd, Completion, TokenLogprob
from kiln.core.errors import InternalError
from kiln.core.tokens import FinishReason
from kiln.dialects.openai.request import ChatReply
from kiln.dialects.openai.usage import Counting, to_usage
from kiln.wire import openai_chat as wire

_NAMES: dict[FinishReason, wire.FinishName] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
    FinishReason.CONTENT_FILTER: "content_filter",
}


def to_response(completion: Completion, reply: ChatReply, counting: Counting) -> wire.ChatResponse:
    head = completion.head
    return wire.ChatResponse(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=[_choice(choice, reply) for choice in completion.choices],
        usage=to_usage([(head, completion.choices)], counting),
        service_tier=reply.tier if reply.tier is not None else UNSET,
    )


def finish_name(choice: ChoiceEnd) -> wire.FinishName:
    """The wire's word for how a choice ended. A failed call counts where the model ended by itself."""
    if choice.malformed_call and choice.finish_reason in (FinishReason.STOP, FinishReason.TOOL_CALLS):
        return "malformed_function_call"
    name = _NAMES.get(choice.finish_reason)
    if name is None:
        raise InternalError(f"no finish reason for {choice.finish_reason}")
    return name


def to_logprobs(tokens: Iterable[TokenLogprob]) -> wire.ChoiceLogprobs:
    return wire.ChoiceLogprobs(content=[_token(token) for token in tokens])


def _token(token: TokenLogprob) -> wire.TokenLogprob:
    return wire.TokenLogprob(
        token=_text(token.text),
        logprob=token.logprob,
        bytes=list(token.text),
        top_logprobs=[
            wire.TopLogprob(token=_text(text), logprob=logprob, bytes=list(text))
            for _, text, logprob in token.top
        ],
    )


def _text(piece: bytes) -> str:
    # Half a character shows as U+FFFD here; `bytes` has what it really is.
    return piece.decode("utf-8", "replace")


def _choice(choice: ChoiceEnd, reply: ChatReply) -> wire.Choice:
    shows_reasoning = choice.reasoning != "" and not reply.exclude_reasoning
    calls = [_call(call) for call in choice.tool_calls]
    return wire.Choice(
        index=choice.index,
        message=wire.MessageOutput(
            content=choice.content if choice.content or not calls else UNSET,
            reasoning_content=choice.reasoning if shows_reasoning else UNSET,
            tool_calls=calls if calls else UNSET,
        ),
        logprobs=UNSET if choice.logprobs is None else to_logprobs(choice.logprobs),
        finish_reason=finish_name(choice),
    )


def _call(call: dict[str, object]) -> wire.ToolCall:
    function = call["function"]
    assert isinstance(function, dict)
    return wire.ToolCall(id=str(call["id"]), function=wire.FunctionCall(**function))
