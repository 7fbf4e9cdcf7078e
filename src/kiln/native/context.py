"""What the server adds to a conversation: skills on the system turn, and tools of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kiln.core.errors import InvalidField
from kiln.core.messages import Conversation, on_system_turn
from kiln.core.native import NativeChat, SkillUse
from kiln.skills.library import SkillLibrary
from kiln.skills.offer import TOOL_NAMES, SkillOffer

# What the memory is asked about, and learns from, of one message.
MAX_QUESTION_CHARS = 8000


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The skills of one exchange. `pinned` is what the pinned one adds to the system turn."""

    pinned: str | None
    offer: SkillOffer
    uses: tuple[SkillUse, ...] = ()


def open_skills(chat: NativeChat, library: SkillLibrary) -> Surroundings:
    """Look a request's skills up. Reads the disk: call it on a worker thread.

    Raises SkillNotFound, SkillInvalid, and InvalidField for inputs that do not fit or names that clash.
    """
    pinned = None
    uses: tuple[SkillUse, ...] = ()
    if chat.skill is not None:
        pinned = library.pinned(chat.skill, chat.skill_inputs)
        uses = (SkillUse(chat.skill, "active", context="system"),)
    offer = library.offer(chat.skills)
    if chat.skills:
        _refuse_clashes(chat)
    return Surroundings(pinned, offer, uses)


def _refuse_clashes(chat: NativeChat) -> None:
    """The model tells tools apart by their names alone."""
    for name in sorted(TOOL_NAMES & chat.client_tools):
        raise InvalidField(
            f"`tools`: {name} is the name of a tool that `skills` brings with it",
            param="tools",
            hint="Name your tool differently, or leave skills out.",
        )


def surround(
    conversation: Conversation, *, system: Sequence[str], tools: Sequence[dict[str, Any]]
) -> Conversation:
    """The conversation with texts at the end of its system turn, and more tools."""
    messages = conversation.messages
    for text in system:
        messages = on_system_turn(messages, text)
    return replace(conversation, messages=messages, tools=(*conversation.tools, *tools))


def question_of(conversation: Conversation) -> str:
    """What the user said last, or the end of it: files stand before it."""
    said = (message.content for message in reversed(conversation.messages) if message.role == "user")
    return next(said, "")[-MAX_QUESTION_CHARS:]
