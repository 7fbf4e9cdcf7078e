"""The events of a streamed exchange as chat completion chunks (seed 004)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from kiln.core.completion import (
    ChoiceEnd,
    ExchangeEvent,
    ExchangeHead,
    TextDelta,
    TokenLogprob,
    TokenScored,
    ToolCallDelta,
    ToolCallPart,
)
from kiln.dialects.openai.request import ChatReply
from kiln.dialects.openai.response import finish_name, to_logprobs
from kiln.dialects.openai.usage import Counting, to_usage
from kiln.wire import openai_chat as wire


class ChunkEncoder:
    """Turns events of any number of choices into the bytes of server-sent events.

    Log-probabilities wait for the text of their tokens; those of tokens without text go with what follows.
    """

    def __init__(self, head: ExchangeHead, choices: int, reply: ChatReply, counting: Counting) -> None:
        self._head = head
        self._choices = choices
        self._reply = reply
        self._counting = counting
        self._encoder = msgspec.json.Encoder()
        self._scored: dict[int, list[TokenLogprob]] = {}
        self._ends: list[ChoiceEnd] = []
        # A text chunk differs from the last one in its text only: the rest is encoded once.
        self._templates: dict[tuple[int, str], tuple[bytes, bytes]] = {}

    def opening(self) -> bytes:
        """The first chunk of every choice, which carries the role."""
        return b"".join(self._delta(i, wire.Delta(role="assistant")) for i in range(self._choices))

    def encode(self, events: Sequence[ExchangeEvent]) -> bytes:
        if len(events) == 1:
            return self._event(events[0])
        return b"".join([self._event(event) for event in events])

    def closing(self) -> bytes:
        """The usage chunk, if it was asked for, and the end mark."""
        chunk = b""
        if self._reply.include_usage:
            chunk = self._chunk([], usage=to_usage([(self._head, self._in_order())], self._counting))
        return chunk + b"data: [DONE]\n\n"

    def _in_order(self) -> list[ChoiceEnd]:
        return sorted(self._ends, key=lambda end: end.index)

    def _event(self, event: ExchangeEvent) -> bytes:
        if isinstance(event, TextDelta):
            return self._text(event)
        if isinstance(event, TokenScored):
            self._scored.setdefault(event.index, []).append(event.token)
            return b""
        if isinstance(event, ToolCallPart):
            return self._delta(event.index, wire.Delta(tool_calls=[_call_part(event)]))
        if isinstance(event, ToolCallDelta):
            if event.was_shown:
                return b""
            return self._delta(event.index, wire.Delta(tool_calls=[_whole_call(event)]))
        if isinstance(event, ChoiceEnd):
            self._ends.append(event)
            return self._delta(event.index, wire.Delta(), finish=finish_name(event))
        return b""

    def _text(self, event: TextDelta) -> bytes:
        if event.channel == "reasoning" and self._reply.exclude_reasoning:
            return b""
        if self._scored.get(event.index):
            return self._delta(event.index, _text_delta(event.channel, event.text))
        head, tail = self._template(event.index, event.channel)
        return head + self._encoder.encode(event.text) + tail

    def _template(self, index: int, channel: str) -> tuple[bytes, bytes]:
        found = self._templates.get((index, channel))
        if found is None:
            head, _, tail = self._delta(index, _text_delta(channel, ".")).rpartition(b'"."')
            found = self._templates[index, channel] = head, tail
        return found

    def _delta(self, index: int, delta: wire.Delta, *, finish: wire.FinishName | UnsetType = UNSET) -> bytes:
        scored = self._scored.pop(index, None)
        choice = wire.ChunkChoice(
            index=index,
            delta=delta,
            logprobs=to_logprobs(scored) if scored else UNSET,
            finish_reason=finish,
        )
        return self._chunk([choice])

    def _chunk(self, choices: list[wire.ChunkChoice], *, usage: wire.Usage | UnsetType = UNSET) -> bytes:
        chunk = wire.ChatChunk(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=choices,
            usage=usage,
            service_tier=self._reply.tier if self._reply.tier is not None else UNSET,
        )
        return b"data: " + self._encoder.encode(chunk) + b"\n\n"


def _text_delta(channel: str, text: str) -> wire.Delta:
    if channel == "reasoning":
        return wire.Delta(reasoning_content=text)
    return wire.Delta(content=text)


def _whole_call(event: ToolCallDelta) -> wire.ToolCallDelta:
    function = event.call["function"]
    return wire.ToolCallDelta(
        index=event.position,
        id=event.call["id"],
        type="function",
        function=wire.FunctionDelta(name=function["name"], arguments=function["arguments"]),
    )


def _call_part(event: ToolCallPart) -> wire.ToolCallDelta:
    begins = event.name is not None
    return wire.ToolCallDelta(
        index=event.position,
        id=event.id if begins else UNSET,
        type="function" if begins else UNSET,
        function=wire.FunctionDelta(
            name=event.name if event.name is not None else UNSET, arguments=event.arguments
        ),
    )
