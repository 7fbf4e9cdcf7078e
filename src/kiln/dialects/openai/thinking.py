"""What a request says about thinking: OpenAI's efforts, OpenRouter's `reasoning`, kiln's budgets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from kiln.core.errors import InvalidField
from kiln.wire import openai_chat as wire


@dataclass(frozen=True, slots=True)
class ThinkingWish:
    """Resolved wishes. `enabled` None leaves it to the server; `effort` is for templates that read it."""

    enabled: bool | None
    effort: str | None
    budget_tokens: int | None | UnsetType
    budget_ms: int | None | UnsetType
    exclude: bool


# Thinking tokens of each effort; None is no limit.
Efforts = Mapping[str, int | None]


def read_thinking(request: wire.ChatRequest, efforts: Efforts) -> ThinkingWish:
    """An explicit budget outweighs an effort's. Raises InvalidField for wishes that contradict each other."""
    reasoning = request.reasoning if request.reasoning is not None else wire.Reasoning()
    effort = _one_effort(request.reasoning_effort, reasoning.effort)
    if effort is not None and reasoning.max_tokens is not None:
        raise InvalidField(
            "reasoning.max_tokens and an effort exclude each other",
            param="reasoning.max_tokens",
            hint="Send one of them.",
        )
    if reasoning.max_tokens is not None and request.thinking_budget_tokens is not UNSET:
        raise InvalidField(
            "reasoning.max_tokens and thinking_budget_tokens say the same", param="thinking_budget_tokens"
        )
    budget = request.thinking_budget_tokens
    if budget is UNSET and reasoning.max_tokens is not None:
        budget = reasoning.max_tokens
    elif budget is UNSET and effort is not None and effort != "none":
        # `minimal` is OpenAI's word for less than low; low is the least that is configured.
        budget = efforts["low" if effort == "minimal" else effort]
    return ThinkingWish(
        enabled=_enabled(request, reasoning, effort),
        effort=effort,
        budget_tokens=budget,
        budget_ms=request.thinking_budget_ms,
        exclude=reasoning.exclude,
    )


def _one_effort(first: wire.Effort | None, second: wire.Effort | None) -> wire.Effort | None:
    if first is not None and second is not None and first != second:
        raise InvalidField(
            f"reasoning_effort is {first} and reasoning.effort is {second}", param="reasoning.effort"
        )
    return first if first is not None else second


def _enabled(request: wire.ChatRequest, reasoning: wire.Reasoning, effort: wire.Effort | None) -> bool | None:
    """Whether the request turns thinking on or off, by whatever field."""
    named = "reasoning_effort" if request.reasoning_effort is not None else "reasoning.effort"
    wishes = {
        named: None if effort is None else effort != "none",
        "reasoning.enabled": reasoning.enabled,
        "reasoning.max_tokens": None if reasoning.max_tokens is None else True,
        "chat_template_kwargs.enable_thinking": (request.chat_template_kwargs or {}).get("enable_thinking"),
    }
    stated = {name: wish for name, wish in wishes.items() if isinstance(wish, bool)}
    if len(set(stated.values())) > 1:
        on, off = (next(n for n, wish in stated.items() if wish is value) for value in (True, False))
        raise InvalidField(f"{on} turns thinking on and {off} turns it off", param=off)
    return next(iter(stated.values()), None)
