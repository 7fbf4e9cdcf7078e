"""A conversation as every dialect hands it down: no JSON text, no wire types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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


def on_system_turn(messages: Sequence[Message], text: str, *, first: bool = False) -> tuple[Message, ...]:
    """The messages with `text` at the end of their system turn, or at its beginning; it is made if there is
    none. Few templates know two."""
    if not messages or messages[0].role != "system":
        return (Message("system", text), *messages)
    parts = (text, messages[0].content) if first else (messages[0].content, text)
    return (replace(messages[0], content="\n\n".join(filter(None, parts))), *messages[1:])
