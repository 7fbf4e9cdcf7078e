"""What one exchange produced, as values that every dialect can encode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from msgspec import Struct

from kiln.core.budgets import Budget, Outcome
from kiln.core.latency import Latency, TokenTiming
from kiln.core.rollout import Rollout
from kiln.core.tokens import FinishReason

ThinkingSource = Literal["custom", "request", "server_default", "template_default"]


@dataclass(frozen=True, slots=True)
class ThinkingState:
    """Whether the rendered prompt thinks, who decided it, and what the default would have been."""

    enabled: bool
    source: ThinkingSource
    default_enabled: bool


@dataclass(frozen=True, slots=True)
class ExchangeHead:
    """What is known of an exchange once its prompt is rendered. `created` is Unix seconds.

    `adapter` is the name of the adapter or composition, `base` without one.
    """

    id: str
    created: int
    model: str
    prompt_tokens: int
    thinking: ThinkingState
    budget: Budget
    budget_applied: bool
    adapter: str = "base"


class TextDelta(Struct, frozen=True):
    """Text of one choice, in order. Channel `reasoning`, `content`, or, for narrated exchanges, `tool`: a
    call while it is written. What then turns out to be no call comes as content too."""

    index: int
    channel: Literal["reasoning", "content", "tool"]
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """One whole tool call of one choice, OpenAI-shaped; `position` counts the choice's calls.

    `was_shown` says that it came in parts before.
    """

    index: int
    position: int
    call: dict[str, Any]
    was_shown: bool = False


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """A piece of a call's arguments while it is written; the first has the name. Only where a grammar
    guarantees the call."""

    index: int
    position: int
    id: str
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A generated token with its raw log-probability and the likeliest alternatives, best first."""

    token_id: int
    text: bytes
    logprob: float
    top: tuple[tuple[int, bytes, float], ...]


@dataclass(frozen=True, slots=True)
class TokenScored:
    """A token of one choice, before its text; only for exchanges that ask for log-probabilities."""

    index: int
    token: TokenLogprob


@dataclass(frozen=True, slots=True)
class PromptRead:
    """So many prompt tokens are in the KV cache; only for narrated exchanges."""

    index: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """One choice, complete. `outcome` is None unless a budget applied.

    `completion_tokens` counts every generated token, forced and end-of-sequence ones included, and
    `reasoning_tokens` those of them that the thinking took. `cached_tokens` of the prompt were reused.
    `malformed_call` says that a tool call was closed but did not parse or did not fit its tool's schema.
    """

    index: int
    content: str
    reasoning: str
    tool_calls: tuple[dict[str, Any], ...]
    finish_reason: FinishReason
    completion_tokens: int
    outcome: Outcome | None
    latency: Latency | None = None
    rollout: Rollout | None = None
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    malformed_call: bool = False


ExchangeEvent = TextDelta | ToolCallDelta | ToolCallPart | TokenTiming | TokenScored | PromptRead | ChoiceEnd


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished exchange, choices in index order."""

    head: ExchangeHead
    choices: tuple[ChoiceEnd, ...]
