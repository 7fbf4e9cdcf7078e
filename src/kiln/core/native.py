"""The native exchange as values: what is asked beyond a turn, what happens meanwhile, what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from kiln.core.budgets import Budget, Outcome
from kiln.core.completion import TextDelta, TokenLogprob
from kiln.core.messages import Message
from kiln.core.tokens import FinishReason
from kiln.core.turn import ChatTurn

Phase = Literal["downloading", "loading", "session", "prompt"]


@dataclass(frozen=True, slots=True)
class NativeChat:
    """A turn and what the server is to do around it.

    `client_tools` are the names of the tools that the caller runs. `skill_inputs` answer the pinned
    skill's questions, `memory` is the id under which facts are recalled and kept.
    """

    turn: ChatTurn
    stream: bool = False
    client_tools: frozenset[str] = frozenset()
    server_tools: tuple[str, ...] = ()
    skill: str | None = None
    skills: tuple[str, ...] = ()
    skill_inputs: dict[str, Any] = field(default_factory=dict)
    memory: str | None = None
    memory_store: str | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """A step of the preparation. `done` of `total`: bytes of a download, tokens of a prompt."""

    phase: Phase
    done: int | None = None
    total: int | None = None


@dataclass(frozen=True, slots=True)
class SkillUse:
    """A skill was pinned (`active`), is not there, was activated by the model, or had a resource read."""

    name: str
    status: Literal["active", "missing", "activated", "resource"]
    context: str | None = None
    resource: str | None = None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A server tool's call as it goes on. `sources` are what a search found: title, url, snippet."""

    name: str
    status: Literal["running", "done", "error", "denied"]
    args: dict[str, Any] | None = None
    seconds: float | None = None
    result: str | None = None
    sources: tuple[dict[str, str], ...] | None = None


@dataclass(frozen=True, slots=True)
class ClientCall:
    """A tool call that the caller is to run. `arguments` is the JSON text of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Alternative:
    """One completion, over all rounds of its exchange. `outcome` is None unless a budget applied."""

    index: int
    text: str
    thinking: str
    tokens: int
    reason: FinishReason
    outcome: Outcome | None
    logprobs: tuple[TokenLogprob, ...] | None


@dataclass(frozen=True, slots=True)
class Summary:
    """What an exchange came to.

    `tokens` and `prompt_tokens` are sums over its rounds, and so are the seconds; `context` is what the
    last round left in the context window. `messages` are those that the exchange added to the transcript,
    there when it had more than its one answer.
    """

    model: str
    alternatives: tuple[Alternative, ...]
    budget: Budget
    budget_applied: bool
    tokens: int
    thinking_tokens: int
    rate: float
    prompt_tokens: int
    cached_tokens: int
    prompt_seconds: float
    seconds: float
    context: int
    context_length: int
    rounds: int
    calls: tuple[ClientCall, ...] = ()
    messages: tuple[Message, ...] = ()


NativeEvent = Status | TextDelta | SkillUse | ToolUse | ClientCall | Summary
