from __future__ import annotations

from typing import Any

import pytest

from kiln.core.errors import InvalidField, KilnError, ModelLoadError, TemplateFailed
from kiln.core.messages import Conversation, Message
from kiln.text.template import ChatTemplate, content_text

from .samples import GPT_OSS, LLAMA3, MISTRAL, QWEN3, ask


def render(source: str, conversation: Conversation | None = None, **kwargs: Any) -> str:
    conversation = conversation or Conversation(messages=(Message("user", "Hi"),), template_kwargs=kwargs)
    return ChatTemplate(source, bos_text="<s>", eos_text="</s>").render(conversation).text


def with_call(arguments: Any) -> Conversation:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return Conversation(messages=(Message("assistant", "", tool_calls=(call,)),))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (QWEN3, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        (LLAMA3, "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"),
        (MISTRAL, "<s>[INST] Hi [/INST]"),
    ],
)
def test_families_render(source: str, expected: str) -> None:
    assert render(source).startswith(expected)


def test_the_generation_prompt_is_optional() -> None:
    template = ChatTemplate(QWEN3)
    assert template.render(ask("Hi"), add_generation_prompt=False).text == "<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ {'b': 1, 'a': 'é'} | tojson(indent=1, sort_keys=true) }}", '{\n "a": "é",\n "b": 1\n}'),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ tools is none }} {{ documents is none }} {{ tool_choice is defined }}", "True True False"),
        ("{{ messages[0].name is defined }}{{ messages[0].tool_calls is defined }}", "FalseFalse"),
        ("{{ bos_token + eos_token }}", "<s></s>"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("  {% if true %}\n  x\n  {% endif %}\n", "  x\n"),
    ],
)
def test_the_environment_is_that_of_transformers(source: str, expected: str) -> None:
    assert render(source) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ a | tojson }}", '{"x": "é"}'),
        ("{{ a.x }}{{ a is mapping }}{{ a is string }}", "éTrueFalse"),
        ("{{ 'args: ' + a + '!' }}", 'args: {"x":"é"}!'),
        ("{{ 'args: ' ~ a }}", 'args: {"x":"é"}'),
        ("{% for k, v in a.items() %}{{ k }}={{ v }}{% endfor %}", "x=é"),
    ],
)
def test_json_arguments_are_an_object_and_a_text(source: str, expected: str) -> None:
    source = "{% set a = messages[0].tool_calls[0].function.arguments %}" + source
    assert render(source, with_call('{"x":"é"}')) == expected


@pytest.mark.parametrize("arguments", ["not json", "[1]", "", "[" * 100_000])
def test_other_arguments_stay_text(arguments: str) -> None:
    assert render("{{ messages[0].tool_calls[0].function.arguments }}", with_call(arguments)) == arguments


def test_calls_of_any_shape_pass() -> None:
    message = Message("assistant", "", tool_calls=("text", 3, {"name": "f", "arguments": '{"a": 1}'}))
    out = render("{{ messages[0].tool_calls | tojson }}", Conversation(messages=(message,)))
    assert out == '["text", 3, {"name": "f", "arguments": {"a": 1}}]'


def test_messages_carry_what_they_have() -> None:
    message = Message("tool", "4", name="add", tool_call_id="call_1")
    out = render("{{ messages[0] | tojson }}", Conversation(messages=(message,)))
    assert out == '{"role": "tool", "content": "4", "name": "add", "tool_call_id": "call_1"}'


def test_earlier_reasoning_goes_under_the_templates_own_key() -> None:
    conversation = Conversation(messages=(Message("assistant", "b", reasoning_content="a"),))
    assert "analysis<|message|>a<|end|>" in render(GPT_OSS, conversation)
    assert "<think>\na\n</think>\n\nb" in render(QWEN3, conversation)


def test_tools_choice_and_arguments_reach_the_template() -> None:
    conversation = Conversation(
        messages=(), tools=({"name": "f"},), tool_choice="required", template_kwargs={"effort": "high"}
    )
    out = render("{{ tools | tojson }} {{ tool_choice }} {{ effort == 'high' }}", conversation)
    assert out == '[{"name": "f"}] required True'


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"])
def test_arguments_cannot_replace_the_conversation(name: str) -> None:
    with pytest.raises(InvalidField) as refused:
        ChatTemplate("").render(Conversation(messages=(), template_kwargs={name: []}))
    assert refused.value.param == "chat_template_kwargs"


def test_the_templates_own_words() -> None:
    conversation = ask("a", "b")
    with pytest.raises(TemplateFailed) as failed:
        render(MISTRAL, conversation)
    assert failed.value.message == "roles must alternate, got user"


@pytest.mark.parametrize(
    "source",
    [
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ range(10 ** 7) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ nothing | tojson }}",
        "{% include 'other' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(90000) %}{{ 'a' * 1000 }}{% endfor %}",
        "{{ raise_exception() }}",
        "{{ raise_exception('') }}",
    ],
)
def test_a_template_that_goes_wrong_is_a_request_error(source: str) -> None:
    with pytest.raises(TemplateFailed) as failed:
        render(source)
    assert failed.value.status == 400 and failed.value.message


def test_deep_values_are_a_request_error() -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(TemplateFailed):
        render("", deep=deep)


@pytest.mark.parametrize("source", ["{% if %}", "{{ a | nofilter }}", "{% nothing %}", "{{ '" + "(" * 5000])
def test_a_template_that_does_not_compile(source: str) -> None:
    with pytest.raises(ModelLoadError):
        ChatTemplate(source)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("a", "a"),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"], "abc"),
        ([{"type": "output_text", "text": "a"}, {"type": "image_url", "image_url": {}}], "a"),
        ([{"text": "a"}], "a"),
        ([1, None, {"type": "text", "text": "a"}], "a"),
    ],
)
def test_content_parts(content: object, text: str) -> None:
    assert content_text(content) == text


@pytest.mark.parametrize("content", [1, {}, [{"type": "text"}], [{"type": "text", "text": 1}]])
def test_wrong_content_parts(content: object) -> None:
    with pytest.raises(KilnError) as refused:
        content_text(content)
    assert isinstance(refused.value, InvalidField) and refused.value.param == "messages"
