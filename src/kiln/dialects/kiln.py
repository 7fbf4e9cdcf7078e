"""The `/v1` dialect: chat completions of the Kiln inference contract v1, to core values and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from kiln.adapters.names import check_name
from kiln.core.completion import ChoiceEnd, Completion, ExchangeEvent, ExchangeHead, TextDelta, ToolCallDelta
from kiln.core.errors import InvalidField
from kiln.core.latency import TokenTiming
from kiln.core.messages import Conversation, Message
from kiln.core.rollout import AdapterIdentity
from kiln.core.sampling import MAX_SEED, SamplingOverrides
from kiln.core.turn import ChatTurn
from kiln.dialects.performance import finish_reason_name, to_performance, to_token_timing
from kiln.dialects.rollouts import canonical_sha256, to_provenance
from kiln.dialects.validate import decode, require_finite, require_range, text_list
from kiln.text.template import content_text
from kiln.thinking.budget import to_outcome, to_record
from kiln.wire import kiln as wire
from kiln.wire.common import GenerationFields
from kiln.wire.kiln_chat import ConversationFields

MAX_CHOICES = 64
MAX_STOPS = 256
MAX_STOP_BYTES = 16384
MAX_RECORDED_ARGUMENTS = 255  # one more may be kiln's own enable_thinking
MAX_RECORDED_BYTES = 1_048_000

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
