"""A conversation as every dialect hands it down: no JSON text, no wire types."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Message:
    """One message for the chat template. `tool_calls` are OpenAI-shaped values, passed on as they came."""

    role: str
    content: str = ""
    reasoning_content: str | None = None
    tool_calls: tuple[Any, ...] | None = None
    name: str | None = None
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the chat template renders."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()
    tool_choice: Any = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
