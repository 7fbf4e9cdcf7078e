"""Which tags enclose a model's reasoning, and what its chat template does with them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kiln.core.errors import KilnError
from kiln.core.messages import Conversation, Message
from kiln.text.template import ChatTemplate


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The texts that open and close a reasoning block."""

    open: str
    close: str


# The more particular families come first: a channel template may also mention `<think>` in passing.
KNOWN_TAGS: tuple[ReasoningTags, ...] = (
    ReasoningTags("<|channel|>analysis<|message|>", "<|end|>"),  # GPT-OSS
    ReasoningTags("<|channel>thought\n", "<channel|>"),  # Gemma 4
    ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ReasoningTags("<seed:think>", "</seed:think>"),  # Seed-OSS
    ReasoningTags("[THINK]", "[/THINK]"),  # Magistral
    ReasoningTags("◁think▷", "◁/think▷"),  # Kimi
    ReasoningTags("<|begin_of_thought|>", "<|end_of_thought|>"),  # OpenThoughts
    ReasoningTags("<think>", "</think>"),  # Qwen, DeepSeek, GLM and most others
    ReasoningTags("<thinking>", "</thinking>"),
    ReasoningTags("<reasoning>", "</reasoning>"),
    ReasoningTags("<thought>", "</thought>"),  # EXAONE Deep
)


def find_tags(template_source: str) -> ReasoningTags | None:
    """The family a chat template mentions, None when it mentions none.

    A family whose open and close both occur is preferred. Else one half will do, as with templates that
    only cut old thoughts away at `</think>`; but not `<|end|>`, which also ends ordinary turns.
    """
    for tags in KNOWN_TAGS:
        if _core(tags.open) in template_source and tags.close in template_source:
            return tags
    for tags in KNOWN_TAGS:
        if _core(tags.open) in template_source:
            return tags
        if tags.close != "<|end|>" and tags.close in template_source:
            return tags
    return None


def _core(tag: str) -> str:
    """The tag without line ends, which a template's source spells as escapes."""
    return tag.strip()


def starts_in_reasoning(text: str, tags: ReasoningTags | None) -> bool:
    """Whether generation behind this prompt begins inside a reasoning block."""
    return tags is not None and text.rstrip().endswith(tags.open.rstrip())


@dataclass(frozen=True, slots=True)
class TemplateThinking:
    """What a chat template does about thinking.

    `default_enabled`: a prompt rendered without `enable_thinking` begins inside a reasoning block, or would
    once the open tag is appended. `can_toggle`: `enable_thinking` makes a difference.
    `leaves_open_to_model`: the template closes an empty block when thinking is off, but leaves it to the
    model to open one when it is on (Qwen3).
    """

    default_enabled: bool = False
    can_toggle: bool = False
    leaves_open_to_model: bool = False


def probe_template(template: ChatTemplate, tags: ReasoningTags | None) -> TemplateThinking:
    """Find out by rendering a one-message conversation three ways. A template that refuses does not think."""
    try:
        by_default = _render_probe(template, {})
        when_on = _render_probe(template, {"enable_thinking": True})
        when_off = _render_probe(template, {"enable_thinking": False})
    except KilnError:
        return TemplateThinking()
    can_toggle = when_on != when_off
    if tags is None:
        return TemplateThinking(can_toggle=can_toggle)
    opens_itself = starts_in_reasoning(when_on, tags)
    leaves_open = not opens_itself and _ends_in_empty_block(when_off, tags) and can_toggle
    would_open = leaves_open and not _ends_in_empty_block(by_default, tags)
    return TemplateThinking(
        default_enabled=starts_in_reasoning(by_default, tags) or would_open,
        can_toggle=can_toggle,
        leaves_open_to_model=leaves_open,
    )


def _render_probe(template: ChatTemplate, kwargs: dict[str, Any]) -> str:
    conversation = Conversation(messages=(Message("user", "Hello"),), template_kwargs=kwargs)
    return template.render(conversation).text


def _ends_in_empty_block(text: str, tags: ReasoningTags) -> bool:
    block = re.escape(tags.open.rstrip()) + r"\s*" + re.escape(tags.close) + r"\s*\Z"
    return re.search(block, text) is not None
