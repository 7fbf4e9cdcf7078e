"""Nobody but the template writes control tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiln.core.errors import TemplateFailed
from kiln.core.messages import Conversation, Message
from kiln.text.shield import RenderedPrompt, encode_prompt
from kiln.text.template import ChatTemplate

from .samples import (
    CHANNEL_TOKENS,
    CONTROL,
    GPT_OSS,
    LLAMA3,
    LLAMA_TOKENS,
    MISTRAL,
    MISTRAL_TOKENS,
    QWEN3,
    QWEN35,
    USER_DEFINED,
    ToyTokenizer,
    ask,
)

QWEN = ToyTokenizer(CONTROL, USER_DEFINED)
FAMILIES = {
    "qwen3": (QWEN3, QWEN),
    "qwen3.5": (QWEN35, QWEN),
    "llama3": (LLAMA3, ToyTokenizer(LLAMA_TOKENS)),
    "mistral": (MISTRAL, ToyTokenizer(MISTRAL_TOKENS)),
    "gpt-oss": (GPT_OSS, ToyTokenizer(CHANNEL_TOKENS)),
}
# Templates that do to a text what a clever attacker would like.
GLUE = "{% for m in messages %}<|im_start|>{{ m.name }}{{ m.content | trim }}{{ m.tool_call_id }}{% endfor %}"
BRACKETS = "{% for m in messages %}<|{{ m.content }}|><{{ m.name }}>{% endfor %}<|im_end|>"
UNTAG = (
    "{% for m in messages %}{{ m.content | replace('<think>', '') | replace('</think>', '') }}{% endfor %}"
)
LAST = "m.content.split('</think>')[-1].strip('\\n')"
PARTS = "{% for m in messages %}{{ " + LAST + " }}|im_end|>{{ m.name | trim }}{% endfor %}"

SCRAPS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "<|im_", "end|>", "im_end", "<"]
SCRAPS += [
    "|im_end|>",
    ">",
    "|>",
    "<|",
    "think",
    "</",
    "[INST]",
    "[/INST]",
    "[",
    "</s>",
    "<s",
    "s>",
    "end",
    "|",
]
SCRAPS += ["<|start|>", "<|message|>", "<|end|>", "<|eot_id|>", "<|eot", "_id|>", " ", "\n", "\n\n", "a", "é"]
TEXTS = st.lists(st.sampled_from(SCRAPS), max_size=6).map("".join)
PLAIN = st.text(st.characters(exclude_characters="<>|[]", exclude_categories=["Cs", "Co"]), max_size=30)


def added(tokenizer: ToyTokenizer, prompt: RenderedPrompt) -> list[int]:
    """The ids of markup in the encoded prompt; whitespace tokens are text like any other."""
    ids = encode_prompt(prompt, tokenizer)
    assert tokenizer.decode(ids) == prompt.text
    return [i for i in ids if i in tokenizer.added_ids and not tokenizer.pieces[i].isspace()]


@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("family", FAMILIES)
@given(text=TEXTS)
def test_no_user_text_adds_a_token(family: str, text: str) -> None:
    source, tokenizer = FAMILIES[family]
    template = tokenizer.template(source)
    prompt = template.render(ask(text))
    assert added(tokenizer, prompt) == added(tokenizer, template.render(ask("plain")))
    assert prompt.text == ChatTemplate(source, bos_text=tokenizer.bos_text).render(ask(text)).text


@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("source", [GLUE, BRACKETS, PARTS])
@given(content=TEXTS, name=TEXTS, call_id=TEXTS)
def test_no_neighbour_completes_a_spelling(source: str, content: str, name: str, call_id: str) -> None:
    template = QWEN.template(source)

    def render(content: str, name: str, call_id: str) -> RenderedPrompt:
        message = Message("tool", content, name=name, tool_call_id=call_id)
        return template.render(Conversation(messages=(message,)))

    assert added(QWEN, render(content, name, call_id)) == added(QWEN, render("x", "x", "x"))


@settings(deadline=None)
@given(TEXTS)
def test_no_assistant_text_adds_a_control_token(content: str) -> None:
    for source in (UNTAG, QWEN3):
        template = QWEN.template(source)
        message = Message("assistant", content, reasoning_content=content)
        prompt = template.render(Conversation(messages=(message,)))
        plain = template.render(Conversation(messages=(Message("assistant", "x"),)))
        for token in QWEN.control_ids:
            assert added(QWEN, prompt).count(token) == added(QWEN, plain).count(token)


@settings(deadline=None)
@given(TEXTS, TEXTS)
def test_no_tool_definition_adds_a_token(key: str, text: str) -> None:
    source = "{% for t in tools %}{% for k in t %}<{{ k }}>{{ t[k] | tojson(ensure_ascii=true) }}{% endfor %}"
    template = QWEN.template(source + "{{ tools | tojson }}{% endfor %}<|im_end|>")
    tool = {"type": "function", key: [text, {key: text}]}
    prompt = template.render(Conversation(messages=(), tools=(tool,)))
    assert [QWEN.pieces[i] for i in added(QWEN, prompt)] == [b"<|im_end|>"]


@settings(deadline=None)
@given(TEXTS, TEXTS)
def test_no_call_or_template_argument_adds_a_control_token(key: str, text: str) -> None:
    template = QWEN.template(QWEN3 + "{{ extra | tojson }}{{ note }}")
    call = {"id": text, "function": {"name": text, "arguments": {key: text}}}
    message = Message("assistant", "", tool_calls=(call,))
    kwargs: dict[str, Any] = {"extra": {key: [text]}, "note": text}
    prompt = template.render(Conversation(messages=(message,), template_kwargs=kwargs))
    tokens = [QWEN.pieces[i] for i in added(QWEN, prompt) if i in QWEN.control_ids]
    assert tokens == [b"<|im_start|>", b"<|im_end|>", b"<|im_start|>"]


@settings(deadline=None)
@given(TEXTS)
def test_no_role_adds_a_token(role: str) -> None:
    template = QWEN.template(QWEN3)
    if role != "assistant":
        prompt = template.render(ask("x", role=role))
        assert added(QWEN, prompt) == added(QWEN, template.render(ask("x")))


@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("family", FAMILIES)
@given(text=PLAIN)
def test_ordinary_prompts_are_encoded_as_ever(family: str, text: str) -> None:
    source, tokenizer = FAMILIES[family]
    prompt = tokenizer.template(source).render(ask(text))
    assert prompt.shield not in prompt.marked
    assert encode_prompt(prompt, tokenizer) == tokenizer.encode(prompt.text)


@pytest.mark.parametrize("text", ["a < b", "x <", "> quoted", "1 > 0 |", "</", "<|im_", "a  b\n\nc", "user"])
def test_half_a_spelling_is_not_cut(text: str) -> None:
    prompt = QWEN.template(QWEN35).render(ask(text))
    assert prompt.marked == prompt.text


def test_tags_of_the_assistant_stay_whole() -> None:
    message = Message("assistant", "<think>\nwhy\n</think>\n\nso <|im_end|>")
    prompt = QWEN.template(QWEN3).render(Conversation(messages=(message,)))
    assert prompt.text.startswith("<|im_start|>assistant\n<think>\nwhy\n</think>\n\nso <|im_end|>")
    assert prompt.marked.count(prompt.shield) == 1


def test_a_role_that_is_also_a_token_still_compares() -> None:
    tokenizer = ToyTokenizer(["<|user|>", "<|end|>"])
    source = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'user' %}yes{% endif %}{% endfor %}"
    )
    template = tokenizer.template(source)
    assert len(added(tokenizer, template.render(ask("x")))) == 1
    assert added(tokenizer, template.render(ask("x", role="end"))) == []


def test_words_and_whitespace_of_the_vocabulary_are_left_alone() -> None:
    tokenizer = ToyTokenizer(["<s>"], ["hello", "\n\n", "----", "<b>"])
    prompt = tokenizer.template("{{ messages[0].content }}").render(ask("hello\n\n----"))
    assert encode_prompt(prompt, tokenizer) == tokenizer.encode("hello\n\n----")
    prompt = tokenizer.template("{{ messages[0].content }}").render(ask("<b>"))
    assert encode_prompt(prompt, tokenizer) == list(b"<b>")


def test_only_the_template_opens_reasoning() -> None:
    template = ChatTemplate("{{ messages[0].content }}", extra_spellings=["<think>", "</think>"])
    assert not template.render(ask("a <think>\n")).ends_with("<think>")
    prompt = template.render(ask("a")).with_suffix("<think>\n")
    assert prompt.ends_with("<think>") and prompt.text == "a<think>\n"


def test_private_use_characters_of_the_user_stay() -> None:
    text = "\U000f0000<|im_end|>\U0010fffd"
    prompt = QWEN.template(QWEN35).render(ask(text))
    assert text in prompt.text


def test_marks_do_not_show_in_errors() -> None:
    with pytest.raises(TemplateFailed) as failed:
        QWEN.template("{{ raise_exception('bad role ' + messages[0].role) }}").render(
            ask("", role="<|im_end|>")
        )
    assert failed.value.message == "bad role <|im_end|>"


def test_a_mark_cut_by_a_template_leaves_nothing() -> None:
    prompt = QWEN.template("{{ messages[0].content[:4] }}").render(ask("x <|im_end|>"))
    assert prompt.text == "x <"


def test_a_prompt_without_shield() -> None:
    prompt = RenderedPrompt("a<|im_end|>", "")
    assert prompt.text == "a<|im_end|>"
    assert encode_prompt(prompt, QWEN) == QWEN.encode("a<|im_end|>")
