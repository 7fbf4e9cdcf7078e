"""From token events to text: detokenize, split reasoning, content and tool calls, stop where asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kiln.chat.models.served import ServedModel
from kiln.chat.preparing.prepare import Prepared
from kiln.chat.structured.grammar import may_open_thought
from kiln.chat.telemetry.latency import LatencyLedger
from kiln.core.budgets import Outcome
from kiln.core.completion import (
    ChoiceEnd,
    ExchangeEvent,
    PromptRead,
    TextDelta,
    TokenLogprob,
    TokenScored,
    ToolCallDelta,
    ToolCallPart,
)
from kiln.core.rollout import Rollout
from kiln.core.tokens import FinishReason, TokenEvent
from kiln.engine.ports import Delivery, GenerationEnd
from kiln.text.detokenizer import Detokenizer
from kiln.text.scanner import Channel, Scanner, Span
from kiln.text.tool_calls import ToolCall
from kiln.text.tool_calls.check import problem_of
from kiln.text.tool_calls.live import LiveCall


@dataclass(frozen=True, slots=True)
class UnreadCall:
    """A tool call that was closed, before it is parsed. `tokens` of its choice were counted until then.

    `live` has shown its arguments already.
    """

    span: Span
    tokens: int
    live: LiveCall | None


# What feeding gives, until `read_calls` has replaced the calls in it.
RawEvent = ExchangeEvent | UnreadCall


def _scanner_of(prepared: Prepared, model: ServedModel) -> Scanner:
    stops, tool_format = prepared.turn.stop, model.tool_format
    if prepared.turn.prompt is not None:
        # The answer to a raw prompt is given as it was generated.
        return Scanner(tags=None, in_reasoning=False, stops=stops)
    return Scanner(
        tags=model.tags,
        in_reasoning=prepared.in_reasoning,
        stops=stops,
        tools=tool_format.markers if tool_format is not None and prepared.parses_tools else None,
        silent=tool_format.silent if tool_format is not None else (),
        reopens=not prepared.is_constrained
        or may_open_thought(model, in_reasoning=prepared.in_reasoning, thinks=prepared.thinking.enabled),
        calls_lead=prepared.is_constrained,
        live_calls=prepared.guarantees_calls or prepared.turn.narrated,
    )


class ChoiceAssembler:
    """Assembles one choice. Feed it every token in order, then `finish` once.

    `stopped` turns true at the token whose text completed a stop string, or the only call allowed; later
    tokens, which the engine may have made before it heard of the stop, are ignored and not counted.
    Parsing and checking a call may take a while, so `feed` leaves it to `read_calls`, for a worker thread.
    """

    def __init__(self, index: int, prepared: Prepared, model: ServedModel, ledger: LatencyLedger) -> None:
        self._index = index
        self._prepared = prepared
        self._ledger = ledger
        self._rollout: list[TokenEvent] | None = [] if prepared.policy is not None else None
        self._budget_applied = prepared.budget_applied
        self._format = model.tool_format
        self._policy = prepared.turn.tool_policy
        # Whether `feed` or `flush` gave a call that is to be read.
        self.has_unread = False
        self._malformed = False
        self.stopped = False
        self._live: LiveCall | None = None
        self._live_position = 0
        self._eos_ids = frozenset() if prepared.turn.ignore_eos else model.tokenizer.eos_ids
        self._pieces = model.tokenizer.pieces
        self._logprobs: list[TokenLogprob] | None = [] if prepared.turn.top_logprobs is not None else None
        self._detokenizer = Detokenizer(model.tokenizer.pieces, model.hidden_ids)
        self._scanner = _scanner_of(prepared, model)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, object]] = []
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """How many have been taken."""
        return self._tokens

    def stop(self) -> None:
        """Take no further token."""
        self.stopped = True

    def feed(self, delivery: Delivery) -> list[RawEvent]:
        """Events that are ready after a delivery's tokens: each token's text, then its timing."""
        events: list[RawEvent] = []
        if delivery.prompt_read is not None:
            events.append(PromptRead(self._index, delivery.prompt_read))
        for token in delivery.tokens:
            if self.stopped:
                break
            timing = self._ledger.received(token, delivery)
            self._tokens += 1
            if self._rollout is not None:
                self._rollout.append(token)
            if self._logprobs is not None:
                self._logprobs.append(self._to_logprob(token))
                events.append(TokenScored(self._index, self._logprobs[-1]))
            if token.token_id not in self._eos_ids:
                text = self._detokenizer.feed(token.token_id)
                if text:
                    self._add(self._scanner.feed(text), events)
            if timing is not None:
                events.append(replace(timing, enqueued_ms=self._ledger.now_ms()))
        return events

    def flush(self, end: GenerationEnd) -> list[RawEvent]:
        """What was held back, once the last token was fed."""
        if self.stopped:
            return []
        events: list[RawEvent] = []
        tail = self._detokenizer.finish()
        if tail:
            self._add(self._scanner.feed(tail), events)
        turn_ended = end.reason is FinishReason.STOP
        # A call that the model opened and left open has failed; one that a limit cut has not.
        left_open = self._scanner.in_call and turn_ended
        spans = self._scanner.finish(turn_ended=turn_ended)
        self._malformed = self._malformed or (left_open and all(s.channel is not Channel.TOOL for s in spans))
        if self._live is not None and self._live.name is not None:
            # Of a call that was cut the arguments were shown; its text is not shown again.
            self._content.extend(span.text for span in spans if span.channel is Channel.CONTENT)
            spans = [span for span in spans if span.channel is not Channel.CONTENT]
        self._add(spans, events)
        return events

    def read_calls(self, events: Iterable[RawEvent]) -> list[ExchangeEvent]:
        """The events with every call in them parsed and checked, up to the last call that is allowed."""
        read: list[ExchangeEvent] = []
        self.has_unread = False
        for event in events:
            if not isinstance(event, UnreadCall):
                read.append(event)
                continue
            read.extend(self._read_call(event))
            if self._calls and self._policy is not None and not self._policy.parallel:
                self.stopped = True
                self._tokens = event.tokens
                break
        return read

    def end(self, end: GenerationEnd, *, streamed: bool) -> ChoiceEnd:
        """The whole choice."""
        return ChoiceEnd(
            index=self._index,
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            tool_calls=tuple(self._calls),
            finish_reason=self._reason(end),
            completion_tokens=self._tokens,
            outcome=self._outcome(end) if self._budget_applied else None,
            latency=self._ledger.reckon(end.timings, streamed=streamed),
            rollout=self._to_rollout(),
            reasoning_tokens=self._reasoning_tokens(end),
            cached_tokens=end.cached_tokens,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            malformed_call=self._malformed,
        )

    def _outcome(self, end: GenerationEnd) -> Outcome | None:
        """The gate's account. What it counted behind a stop string is as little there as its text."""
        outcome = end.outcome
        if outcome is None or outcome.thinking_tokens <= self._tokens:
            return outcome
        return replace(outcome, thinking_tokens=self._tokens)

    def _reasoning_tokens(self, end: GenerationEnd) -> int:
        """The gate counts whether or not a budget applies; without a gate nothing was thought."""
        outcome = self._outcome(end)
        return 0 if outcome is None else outcome.thinking_tokens

    def _to_logprob(self, token: TokenEvent) -> TokenLogprob:
        score = token.score
        assert score is not None
        top = tuple((other, self._pieces[other], logprob) for other, logprob in score.top)
        return TokenLogprob(token.token_id, self._pieces[token.token_id], score.logprob, top)

    def _to_rollout(self) -> Rollout | None:
        prepared = self._prepared
        if self._rollout is None or prepared.policy is None:
            return None
        return Rollout(
            conversation=prepared.turn.conversation,
            prompt_ids=prepared.prompt_ids,
            tokens=tuple(self._rollout),
            sampling=prepared.sampling,
            max_tokens=prepared.max_tokens,
            stop=prepared.turn.stop,
            seed=prepared.seed,
            budget=prepared.budget,
            budget_applied=prepared.budget_applied,
            close_ids=prepared.close_ids,
            policy=prepared.policy,
        )

    def _reason(self, end: GenerationEnd) -> FinishReason:
        reason = FinishReason.STOP if self.stopped else end.reason
        if reason is FinishReason.STOP and self._calls:
            return FinishReason.TOOL_CALLS
        return reason

    def _add(self, spans: list[Span], events: list[RawEvent]) -> None:
        """Add the events of what the scanner gave."""
        if self._scanner.stopped is not None:
            self.stopped = True
        for span in spans:
            if span.channel is Channel.CONTENT:
                events.append(self._to_content(span.text))
            elif span.channel is Channel.REASONING:
                self._reasoning.append(span.text)
                events.append(TextDelta(self._index, "reasoning", span.text))
            elif span.channel is Channel.TOOL:
                live, self._live = self._live, None
                events.append(UnreadCall(span, self._tokens, live))
                self.has_unread = True
            elif self._prepared.turn.narrated:
                events.append(TextDelta(self._index, "tool", span.text))
            else:
                events.extend(self._show(span))

    def _show(self, span: Span) -> Sequence[ToolCallPart]:
        """The next piece of the call that is being written."""
        assert self._format is not None
        if self._live is None:
            self._live = LiveCall(self._format, self._prepared.tools)
            self._live_position += 1
        had_name = self._live.name is not None
        fragment = self._live.feed(span.text, span.opened_by)
        if self._live.name is None or (had_name and not fragment):
            return ()
        name = None if had_name else self._live.name
        return (ToolCallPart(self._index, self._live_position - 1, self._live.id, name, fragment),)

    def _to_content(self, text: str) -> TextDelta:
        self._content.append(text)
        return TextDelta(self._index, "content", text)

    def _read_call(self, unread: UnreadCall) -> list[ExchangeEvent]:
        """The calls of a span, or its text as the model wrote it where they are none."""
        assert self._format is not None
        span, schemas, policy = unread.span, self._prepared.tools, self._policy
        calls = self._format.parse(span.text, schemas)
        if calls is None:
            # Text that only looked like a call because an answer began with it is no failed call.
            self._malformed = self._malformed or span.opened_by != ""
            return [self._to_content(span.as_written)]
        live = unread.live
        if live is not None and live.name is not None and live.arguments is not None:
            # What was shown is what it is, to the byte.
            shown = ToolCall(live.id, live.name, live.arguments)
            return [self._to_delta(shown, was_shown=True), *(self._to_delta(call) for call in calls[1:])]
        if policy is not None and policy.checked:
            if any(problem_of(call, schemas) is not None for call in calls):
                self._malformed = True
                return [self._to_content(span.as_written)]
        if policy is not None and not policy.parallel:
            calls = calls[:1]
        return [self._to_delta(call) for call in calls]

    def _to_delta(self, call: ToolCall, *, was_shown: bool = False) -> ToolCallDelta:
        shape: dict[str, Any] = call.to_openai()
        self._calls.append(shape)
        return ToolCallDelta(self._index, len(self._calls) - 1, shape, was_shown)
