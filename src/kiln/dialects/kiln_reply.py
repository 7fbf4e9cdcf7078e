"""The `/v1` dialect: what was generated, as responses and chunks of the Kiln inference contract v1."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from kiln.core.completion import ChoiceEnd, Completion, ExchangeEvent, ExchangeHead, TextDelta, ToolCallDelta
from kiln.core.latency import TokenTiming
from kiln.core.rollout import AdapterIdentity
from kiln.dialects.performance import finish_reason_name, to_performance, to_token_timing
from kiln.dialects.rollouts import canonical_sha256, to_provenance
from kiln.thinking.budget import to_outcome, to_record
from kiln.wire import kiln as wire

EmptyReason = Literal["no_content", "reasoning_without_final_content", "tool_call"]


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """How the answer is to be shaped, apart from what is generated."""

    stream: bool
    include_usage: bool
    fold_reasoning: bool
    config_hashes: wire.ConfigHashes | None
    performance: bool = False

    def with_adapter(self, adapter: AdapterIdentity | None) -> ReplyOptions:
        """The same for a request that runs with an adapter: it is part of the effective configuration."""
        hashes = self.config_hashes
        if adapter is None or hashes is None:
            return self
        effective = canonical_sha256([hashes.effective_config_hash, adapter.content_sha256])
        return replace(self, config_hashes=msgspec.structs.replace(hashes, effective_config_hash=effective))


def to_response(completion: Completion, options: ReplyOptions) -> wire.ChatCompletionResponse:
    """The non-streaming response. `metadata` speaks of choice 0, as the contract rules for n > 1."""
    head, first = completion.head, completion.choices[0]
    folded = options.fold_reasoning and first.reasoning != ""
    empty = _empty_reason(first)
    record = to_record(head.budget, applied=head.budget_applied, outcome=first.outcome)
    return wire.ChatCompletionResponse(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=[_to_choice(choice, options) for choice in completion.choices],
        usage=_usage(head, completion.choices),
        metadata=wire.ChatCompletionMetadata(
            thinking_enabled=head.thinking.enabled,
            thinking_mode="reasoning" if head.thinking.enabled else "non_reasoning",
            thinking_source=head.thinking.source,
            default_thinking_enabled=head.thinking.default_enabled,
            final_content_empty=first.content == "",
            content_empty_reason=empty if empty is not None else UNSET,
            reasoning_folded_into_content=folded,
            thinking_budget=record,
            config_hashes=options.config_hashes if options.config_hashes is not None else UNSET,
            performance=to_performance(head, first) if options.performance else UNSET,
        ),
    )


class ChunkEncoder:
    """Turns the events of one streamed exchange (one choice) into the bytes of server-sent events."""

    def __init__(self, head: ExchangeHead, options: ReplyOptions) -> None:
        self._head = head
        self._options = options
        self._encoder = msgspec.json.Encoder()
        self._fold_open = False
        self._folding = options.fold_reasoning
        # A text chunk differs from the last one in its text only: the rest is encoded once.
        mark = b'"."'
        self._templates = {
            "content": self._delta(wire.Delta(content=".")).rpartition(mark),
            "reasoning_content": self._delta(wire.Delta(reasoning_content=".")).rpartition(mark),
        }

    def opening(self) -> bytes:
        """The first chunk, which carries the role."""
        return self._delta(wire.Delta(role="assistant"))

    def encode(self, events: Sequence[ExchangeEvent]) -> bytes:
        if len(events) == 1:
            return self._event(events[0])
        return b"".join([self._event(event) for event in events])

    def closing(self) -> bytes:
        """Nothing: the last chunk of the one choice has said everything."""
        return b""

    def _event(self, event: ExchangeEvent) -> bytes:
        if isinstance(event, TextDelta):
            if event.channel == "content":
                text = self._text("content", event.text)
                return self._close_fold() + text if self._fold_open else text
            if event.channel == "reasoning":
                text = self._text("reasoning_content", event.text)
                return text + self._fold(event.text) if self._folding else text
            return b""  # raw tool traffic: the contract carries the parsed call
        if isinstance(event, ToolCallDelta):
            call = {"index": event.position, **event.call}
            return self._close_fold() + self._delta(wire.Delta(tool_calls=[call]))
        if isinstance(event, TokenTiming):
            return self._timing(event) if self._options.performance else b""
        if isinstance(event, ChoiceEnd):
            return self._close_fold() + self._ending(event)
        # The contract has no place for log-probabilities or progress.
        return b""

    def _ending(self, end: ChoiceEnd) -> bytes:
        head = self._head
        record = to_record(head.budget, applied=head.budget_applied, outcome=end.outcome)
        finish = wire.ChunkChoice(
            index=end.index, delta=wire.Delta(), finish_reason=finish_reason_name(end.finish_reason)
        )
        performance = to_performance(head, end) if self._options.performance else UNSET
        metadata = wire.StreamingTerminalMetadata(thinking_budget=record, performance=performance)
        chunk = self._chunk([finish], metadata=metadata)
        if self._options.include_usage:
            chunk += self._chunk([], usage=_usage(head, [end]))
        return chunk + b"data: [DONE]\n\n"

    def _text(self, channel: str, text: str) -> bytes:
        head, _, tail = self._templates[channel]
        return head + self._encoder.encode(text) + tail

    def _timing(self, timing: TokenTiming) -> bytes:
        return b"data: " + self._encoder.encode(to_token_timing(timing)) + b"\n\n"

    def _fold(self, text: str) -> bytes:
        opening = "" if self._fold_open else "<think>\n"
        self._fold_open = True
        return self._text("content", opening + text)

    def _close_fold(self) -> bytes:
        """End the folded block before anything else is content; later reasoning is not folded again."""
        if not self._fold_open:
            return b""
        self._fold_open = self._folding = False
        return self._delta(wire.Delta(content=_FOLD_END))

    def _delta(self, delta: wire.Delta) -> bytes:
        return self._chunk([wire.ChunkChoice(index=0, delta=delta)])

    def _chunk(
        self,
        choices: list[wire.ChunkChoice],
        *,
        metadata: wire.StreamingTerminalMetadata | UnsetType = UNSET,
        usage: wire.Usage | UnsetType = UNSET,
    ) -> bytes:
        chunk = wire.ChatCompletionChunk(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=choices,
            metadata=metadata,
            usage=usage,
        )
        return b"data: " + self._encoder.encode(chunk) + b"\n\n"


_FOLD_END = "\n</think>\n\n"


def _to_choice(choice: ChoiceEnd, options: ReplyOptions) -> wire.Choice:
    content = choice.content
    if options.fold_reasoning and choice.reasoning:
        content = f"<think>\n{choice.reasoning}{_FOLD_END}{content}"
    return wire.Choice(
        index=choice.index,
        message=wire.ChatMessageOutput(
            role="assistant",
            content=content,
            reasoning_content=choice.reasoning if choice.reasoning else UNSET,
            tool_calls=list(choice.tool_calls) if choice.tool_calls else UNSET,
        ),
        finish_reason=finish_reason_name(choice.finish_reason),
        thinking_budget=to_outcome(choice.outcome) if choice.outcome is not None else UNSET,
        rollout_provenance=to_provenance(choice.rollout) if choice.rollout is not None else UNSET,
    )


def _empty_reason(choice: ChoiceEnd) -> EmptyReason | None:
    if choice.content:
        return None
    if choice.tool_calls:
        return "tool_call"
    return "reasoning_without_final_content" if choice.reasoning else "no_content"


def _usage(head: ExchangeHead, choices: Iterable[ChoiceEnd]) -> wire.Usage:
    completion = sum(choice.completion_tokens for choice in choices)
    return wire.Usage(
        prompt_tokens=head.prompt_tokens,
        completion_tokens=completion,
        total_tokens=head.prompt_tokens + completion,
    )
