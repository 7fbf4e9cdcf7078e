"""What the rounds of one exchange add up to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kiln.chat.preparing.prepare import Prepared
from kiln.core.budgets import Budget, Outcome, Trigger
from kiln.core.completion import ChoiceEnd, Completion, TokenLogprob
from kiln.core.messages import Message
from kiln.core.native import Alternative, ClientCall, Summary
from kiln.core.tokens import FinishReason
from kiln.core.turn import ChatTurn

# Between what two rounds wrote on one channel.
ROUND_GAP = "\n\n"


@dataclass(slots=True)
class _Running:
    """One alternative so far."""

    text: str = ""
    thinking: str = ""
    tokens: int = 0
    reason: FinishReason = FinishReason.STOP
    outcome: Outcome | None = None
    logprobs: list[TokenLogprob] | None = None

    def add(self, choice: ChoiceEnd) -> None:
        self.text = join_rounds(self.text, choice.content)
        self.thinking = join_rounds(self.thinking, choice.reasoning)
        self.tokens += choice.completion_tokens
        self.reason = choice.finish_reason
        self.outcome = _join_outcomes(self.outcome, choice.outcome)
        if choice.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *choice.logprobs]

    def finished(self, index: int) -> Alternative:
        logprobs = None if self.logprobs is None else tuple(self.logprobs)
        return Alternative(index, self.text, self.thinking, self.tokens, self.reason, self.outcome, logprobs)


@dataclass(slots=True)
class Account:
    """Sums over rounds. Token limits and thinking budgets are the whole exchange's."""

    alternatives: list[_Running] = field(default_factory=list)
    rounds: int = 0
    budget: Budget | None = None
    budget_applied: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    thinking_tokens: int = 0
    context: int = 0
    prompt_s: float = 0.0
    generation_s: float = 0.0
    _thought_tokens: int = 0
    _thought_ms: int = 0
    _max_tokens: int = 0
    _decoded: int = 0

    def add(self, prepared: Prepared, completion: Completion, max_tokens_default: int) -> None:
        """Count one round."""
        head, choices = completion.head, completion.choices
        if not self.rounds:
            asked = prepared.turn.max_tokens
            self._max_tokens = max_tokens_default if asked is None else asked
            self.budget = head.budget
            self.alternatives = [_Running() for _ in choices]
        self.rounds += 1
        self.budget_applied = self.budget_applied or head.budget_applied
        for running, choice in zip(self.alternatives, choices, strict=True):
            running.add(choice)
        self.prompt_tokens += head.prompt_tokens
        # The alternatives share one reading of the prompt: the first one's.
        self.cached_tokens += choices[0].cached_tokens
        self.thinking_tokens += sum(choice.reasoning_tokens for choice in choices)
        self._thought_tokens += choices[0].reasoning_tokens
        self._thought_ms += choices[0].outcome.thinking_time_ms if choices[0].outcome is not None else 0
        self.context = head.prompt_tokens + max(choice.completion_tokens for choice in choices)
        self._decoded += sum(max(0, choice.completion_tokens - 1) for choice in choices)
        self._add_times(choices)

    def _add_times(self, choices: tuple[ChoiceEnd, ...]) -> None:
        reads, generations = [0.0], [0.0]
        for choice in choices:
            latency = choice.latency
            if latency is not None and latency.ttft_ms is not None:
                reads.append((latency.prefill_wall_ms or 0.0) / 1000)
                generations.append(max(0.0, latency.total_ms - latency.ttft_ms) / 1000)
        self.prompt_s += max(reads)
        self.generation_s += max(generations)

    @property
    def tokens(self) -> int:
        return sum(running.tokens for running in self.alternatives)

    @property
    def tokens_left(self) -> int:
        """What the exchange's limit leaves for another round."""
        return self._max_tokens - self.tokens

    def next_turn(self, turn: ChatTurn) -> ChatTurn:
        """The turn of another round, with what is left of the limits."""
        assert self.budget is not None
        tokens, time_ms = self.budget.tokens.value, self.budget.time_ms.value
        return replace(
            turn,
            max_tokens=self.tokens_left,
            budget_tokens=turn.budget_tokens if tokens is None else max(0, tokens - self._thought_tokens),
            budget_ms=turn.budget_ms if time_ms is None else max(0, time_ms - self._thought_ms),
        )

    def summary(
        self,
        model: str,
        context_length: int,
        *,
        reason: FinishReason | None = None,
        calls: tuple[ClientCall, ...] = (),
        messages: tuple[Message, ...] = (),
    ) -> Summary:
        """The sums. `reason` replaces that of the last round."""
        assert self.budget is not None
        if reason is not None:
            self.alternatives[0].reason = reason
        return Summary(
            model=model,
            alternatives=tuple(a.finished(i) for i, a in enumerate(self.alternatives)),
            budget=self.budget,
            budget_applied=self.budget_applied,
            tokens=self.tokens,
            thinking_tokens=self.thinking_tokens,
            rate=self._decoded / self.generation_s if self.generation_s > 0 else 0.0,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            prompt_seconds=self.prompt_s,
            seconds=self.generation_s,
            context=self.context,
            context_length=context_length,
            rounds=self.rounds,
            calls=calls,
            messages=messages,
        )


def join_rounds(before: str, after: str) -> str:
    """What a reader sees of two rounds on one channel."""
    return f"{before}{ROUND_GAP}{after}" if before and after else before + after


def _join_outcomes(before: Outcome | None, after: Outcome | None) -> Outcome | None:
    """One account of a budget that several rounds shared: closed says how the last thinking ended."""
    if before is None or after is None:
        return after if before is None else before
    trigger: Trigger | None = before.trigger if before.trigger is not None else after.trigger
    return Outcome(
        trigger=trigger,
        closed=after.closed,
        thinking_tokens=before.thinking_tokens + after.thinking_tokens,
        thinking_time_ms=before.thinking_time_ms + after.thinking_time_ms,
        interrupted=before.interrupted or after.interrupted,
    )
