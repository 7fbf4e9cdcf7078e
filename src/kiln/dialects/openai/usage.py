"""Token counts and cost of an exchange, the same whether it was streamed or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from kiln.core.completion import ChoiceEnd, ExchangeHead
from kiln.core.settings import OpenaiSettings
from kiln.thinking.budget import to_record
from kiln.wire import openai_chat as wire


@dataclass(frozen=True, slots=True)
class Counting:
    """What is the same for all exchanges: prices in dollars a million tokens, and whether prompts are kept.

    `prices` are of prompt, cached prompt and completion tokens.
    """

    prices: tuple[float, float, float] | None
    keeps_prefixes: bool

    @classmethod
    def of(cls, settings: OpenaiSettings, *, keeps_prefixes: bool) -> Counting:
        prompt, completion = settings.price_prompt, settings.price_completion
        if prompt is None or completion is None:
            return cls(None, keeps_prefixes)
        cached = settings.price_cached_prompt
        return cls((prompt, prompt if cached is None else cached, completion), keeps_prefixes)

    def cost(self, prompt: int, cached: int, completion: int) -> float | UnsetType:
        """Dollars."""
        if self.prices is None:
            return UNSET
        of_prompt, of_cached, of_completion = self.prices
        total = (prompt - cached) * of_prompt + cached * of_cached + completion * of_completion
        return round(total / 1e6, 12)


# A prompt and what came of it.
Part = tuple[ExchangeHead, Sequence[ChoiceEnd]]


def to_usage(parts: Sequence[Part], counting: Counting) -> wire.Usage:
    """A prompt is counted once, however many choices share it."""
    prompt = completion = cached = written = 0
    for head, choices in parts:
        generated = sum(choice.completion_tokens for choice in choices)
        # One choice computes the prompt, the others find it in the cache.
        found = min(choice.cached_tokens for choice in choices)
        prompt += head.prompt_tokens
        completion += generated
        cached += found
        # Where nothing was to be generated the prompt was not read either.
        written += head.prompt_tokens - found if generated > 0 and counting.keeps_prefixes else 0
    head, choices = parts[0]
    return wire.Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=wire.PromptDetails(cached_tokens=cached, cache_write_tokens=written),
        completion_tokens_details=wire.CompletionDetails(
            reasoning_tokens=sum(choice.reasoning_tokens for _, of_part in parts for choice in of_part)
        ),
        estimated_cost=counting.cost(prompt, cached, completion),
        thinking_budget=_budget_report(head, choices[0]) if head.budget.configured else UNSET,
    )


def _budget_report(head: ExchangeHead, first: ChoiceEnd) -> wire.BudgetReport:
    record = to_record(head.budget, applied=head.budget_applied, outcome=first.outcome)
    return wire.BudgetReport(
        applied=record.applied,
        max_tokens=record.max_tokens,
        max_time_ms=record.max_time_ms,
        tokens_source=record.tokens_source,
        time_source=record.time_source,
        triggered=record.triggered,
        trigger=record.trigger,
        closed=record.closed,
        thinking_tokens=record.thinking_tokens,
    )
