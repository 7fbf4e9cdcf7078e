from __future__ import annotations

import pytest

from kiln.text.reasoning import (
    KNOWN_TAGS,
    ReasoningTags,
    TemplateThinking,
    find_tags,
    probe_template,
    starts_in_reasoning,
)
from kiln.text.template import ChatTemplate

from .samples import GEMMA4, GPT_OSS, LLAMA3, MAGISTRAL, MISTRAL, QWEN3, QWEN35

THINK = ReasoningTags("<think>", "</think>")


@pytest.mark.parametrize(
    ("source", "opens"),
    [
        (QWEN3, "<think>"),
        (QWEN35, "<think>"),
        (LLAMA3, None),
        (MISTRAL, None),
        (MAGISTRAL, "[THINK]"),
        (GPT_OSS, "<|channel|>analysis<|message|>"),
        (GPT_OSS + "{# unlike <think> and </think> #}", "<|channel|>analysis<|message|>"),
        (GEMMA4, "<|channel>thought\n"),
        ("{{ '<|user|>' + x + '<|end|>' }}", None),
        ("{{ content.split('</think>')[-1] }}", "<think>"),
        ("<reasoning> in words, <think>, </think>", "<think>"),
        ("<seed:think></seed:think>", "<seed:think>"),
    ],
)
def test_the_family_is_found(source: str, opens: str | None) -> None:
    tags = find_tags(source)
    assert (tags.open if tags else None) == opens


@pytest.mark.parametrize(
    ("source", "thinking"),
    [
        (QWEN3, TemplateThinking(default_enabled=True, can_toggle=True, leaves_open_to_model=True)),
        (QWEN35, TemplateThinking(default_enabled=True, can_toggle=True, leaves_open_to_model=False)),
        (GEMMA4, TemplateThinking(default_enabled=False, can_toggle=True, leaves_open_to_model=True)),
        (LLAMA3, TemplateThinking()),
        (GPT_OSS, TemplateThinking()),
        (QWEN3 + "{{ raise_exception('no') }}", TemplateThinking()),
        (QWEN3 + "{{ nothing.at.all }}", TemplateThinking()),
        ("{{ messages[0].content }}<think>\n", TemplateThinking(default_enabled=True)),
    ],
)
def test_what_a_template_does_about_thinking(source: str, thinking: TemplateThinking) -> None:
    assert probe_template(ChatTemplate(source), find_tags(source)) == thinking


def test_a_toggle_without_tags() -> None:
    template = ChatTemplate("{{ 'on' if enable_thinking else 'off' }}")
    assert probe_template(template, None) == TemplateThinking(can_toggle=True)


def test_starting_in_reasoning() -> None:
    assert starts_in_reasoning("a<think>\n", THINK)
    assert not starts_in_reasoning("a<think>\n\n</think>\n\n", THINK)
    assert not starts_in_reasoning("<think>", None)
    assert starts_in_reasoning("<|channel>thought", ReasoningTags("<|channel>thought\n", "<channel|>"))


def test_families_are_distinct() -> None:
    assert len({tags.open for tags in KNOWN_TAGS}) == len(KNOWN_TAGS)
