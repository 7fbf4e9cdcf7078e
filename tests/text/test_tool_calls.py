from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiln.text.reasoning import find_tags
from kiln.text.scanner import Channel, Scanner
from kiln.text.tool_calls import ToolCall, find_tool_format
from kiln.text.tool_calls.json_formats import Hermes

from .samples import GPT_OSS, LLAMA3, MISTRAL, QWEN3

HERMES = Hermes()
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
OBJECTS = st.dictionaries(st.text(), JSON_VALUES, max_size=4)


def parse_tool_call(body: str) -> ToolCall | None:
    calls = HERMES.parse(body, {})
    if calls is None:
        return None
    (call,) = calls
    return call


@settings(deadline=None)
@given(st.text(min_size=1), OBJECTS, st.booleans(), st.booleans())
def test_any_call_comes_back(
    name: str, arguments: dict[str, object], as_text: bool, ascii_only: bool
) -> None:
    value = json.dumps(arguments) if as_text else arguments
    body = json.dumps({"name": name, "arguments": value}, ensure_ascii=ascii_only)
    call = parse_tool_call(f"\n{body}\n")
    assert call is not None
    assert call.name == name
    assert json.loads(call.arguments) == arguments
    assert list(json.loads(call.arguments)) == list(arguments)
    call.arguments.encode()
    assert re.fullmatch("call_[0-9a-f]{24}", call.id)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{}",
        "[]",
        "null",
        '{"name": "f"}',
        '{"name": "", "arguments": {}}',
        '{"name": 1, "arguments": {}}',
        '{"name": "f", "arguments": []}',
        '{"name": "f", "arguments": "[]"}',
        '{"name": "f", "arguments": "x"}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": 1e999}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "f", "arguments": {}} and more',
        "<function=f></function>",
        "[" * 200_000,
        '{"name": "f", "arguments": ' + '{"a":' * 200_000,
    ],
)
def test_what_does_not_parse_is_none(body: str) -> None:
    assert parse_tool_call(body) is None


def test_a_lone_surrogate_stays_an_escape() -> None:
    call = parse_tool_call('{"name": "f", "arguments": {"a": "\\ud800"}}')
    assert call is not None and call.arguments == '{"a": "\\ud800"}'


def test_openai_shape() -> None:
    call = parse_tool_call('{"name": "add", "arguments": {"b": 1, "a": "é"}}')
    assert call is not None
    assert call.to_openai() == {
        "id": call.id,
        "type": "function",
        "function": {"name": "add", "arguments": '{"b": 1, "a": "é"}'},
    }


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (QWEN3, "hermes"),
        (QWEN3 + "<function=example><parameter=x>", "qwen3-coder"),
        (MISTRAL + "{{ '[TOOL_CALLS]' }}", "mistral"),
        (MISTRAL + "{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral-named"),
        (LLAMA3 + '{{ \'{"name": function name, "parameters": {} }\' }}', "llama3"),
        (GPT_OSS, "harmony"),
        (LLAMA3, None),
    ],
)
def test_the_template_decides_the_format(template: str, name: str | None) -> None:
    found = find_tool_format(template)
    assert (found.name if found else None) == name


WEATHER = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"type": ["string", "null"]},
            "spots": {"type": "array"},
        },
    }
}


def read(template: str, answer: str, *, turn_ended: bool = True) -> tuple[list[tuple[str, object]], str]:
    """The calls (name, arguments) and the content of an answer, cut into single characters."""
    found = find_tool_format(template)
    assert found is not None
    scanner = Scanner(tags=None, in_reasoning=False, tools=found.markers, silent=found.silent)
    spans = [span for char in answer for span in scanner.feed(char)]
    spans += scanner.finish(turn_ended=turn_ended)
    calls: list[tuple[str, object]] = []
    content = ""
    for span in spans:
        parsed = found.parse(span.text, WEATHER) if span.channel is Channel.TOOL else None
        if parsed is None:
            content += span.as_written
        else:
            calls += [(call.name, json.loads(call.arguments)) for call in parsed]
    return calls, content


XML = "<tool_call>\n<function=get_weather>\n{}</function>\n</tool_call>"
CODER = QWEN3 + "<function=example><parameter=x>"
LLAMA = LLAMA3 + "<|python_tag|>"
NAMED = MISTRAL + "[TOOL_CALLS][ARGS]"


@pytest.mark.parametrize(
    ("template", "answer", "calls", "content"),
    [
        (
            CODER,
            "Let me look.\n"
            + XML.format("<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"),
            [("get_weather", {"city": "Rome", "days": 3})],
            "Let me look.",
        ),
        (
            CODER,
            XML.format("<parameter=city>\n7\n</parameter><parameter=spots>[1, {}]</parameter>"),
            [("get_weather", {"city": "7", "spots": [1, {}]})],
            "",
        ),
        (CODER, XML.format("<parameter=city>a\nb"), [], XML.format("<parameter=city>a\nb")),
        (LLAMA, '{"name": "f", "parameters": {"a": 1}}', [("f", {"a": 1})], ""),
        (LLAMA, '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
         [("f", {}), ("g", {})], ""),
        (LLAMA, '\n {"answer": 3}', [], '{"answer": 3}'),
        (LLAMA, 'See {"name": "f", "parameters": {}}', [], 'See {"name": "f", "parameters": {}}'),
        (
            MISTRAL + "[TOOL_CALLS]",
            'One moment.[TOOL_CALLS][{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}}]',
            [("f", {"a": [1]}), ("g", {})],
            "One moment.",
        ),
        (NAMED, '[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[CALL_ID]x[ARGS]{}', [("f", {}), ("g", {})], ''),
        (
            GPT_OSS,
            '<|channel|>commentary<|message|>Looking.<|end|><|start|>assistant<|channel|>commentary'
            ' to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}',
            [("get_weather", {"city": "Rome"})],
            "Looking.",
        ),
        (
            GPT_OSS,
            '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>',
            [("f", {})],
            "",
        ),
        (GPT_OSS, ' to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}', [("f", {})], ""),
        (GPT_OSS, "<|channel|>final<|message|>Hello", [], "Hello"),
    ],
)  # fmt: skip
def test_families(template: str, answer: str, calls: list[tuple[str, object]], content: str) -> None:
    assert read(template, answer) == (calls, content)


def test_a_closing_marker_inside_a_json_string_is_data() -> None:
    arguments = {"a": 'see </tool_call> and "</tool_call>" \\', "b": "c"}
    body = json.dumps({"name": "f", "arguments": arguments})
    assert read(QWEN3, f"<tool_call>\n{body}\n</tool_call>") == ([("f", arguments)], "")
    # A string that was never closed does not swallow what follows.
    broken = '<tool_call>\n{"name": "f\n</tool_call>'
    assert read(QWEN3, broken + "\nText.") == ([], broken + "Text.")


@pytest.mark.parametrize("template", [LLAMA, MISTRAL + "[TOOL_CALLS]", NAMED, GPT_OSS])
def test_a_call_that_was_cut_is_text(template: str) -> None:
    found = find_tool_format(template)
    assert found is not None
    framing = found.framing("f")
    assert framing is not None
    whole = framing.before + "{}" + framing.after
    assert read(template, whole)[0] == [("f", {})]
    half = framing.before + "{}"
    calls, content = read(template, half, turn_ended=False)
    assert calls == [] and content == half


@pytest.mark.parametrize("template", [QWEN3, LLAMA, MISTRAL + "[TOOL_CALLS]", NAMED, GPT_OSS])
@settings(deadline=None)
@given(
    arguments=st.dictionaries(
        st.text("ab \n{}\"'\\:é"), st.text('ab<>\n{}[]"\\;') | st.integers() | st.none()
    )
)
def test_what_a_framing_encloses_parses(template: str, arguments: dict[str, object]) -> None:
    found = find_tool_format(template)
    assert found is not None
    framing = found.framing("get_weather")
    assert framing is not None
    answer = framing.before + json.dumps(arguments) + framing.after
    assert read(template, answer) == ([("get_weather", arguments)], "")


def test_a_whole_turn_of_gpt_oss() -> None:
    found = find_tool_format(GPT_OSS)
    assert found is not None
    head = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    for tail, wanted in (
        ("<|channel|>final<|message|>Hello.", [(Channel.CONTENT, "Hello.")]),
        (call, [(Channel.TOOL, 'f <|constrain|>json<|message|>{"a": 1}')]),
    ):
        for cuts in (1, 3, 1000):
            scanner = Scanner(
                tags=find_tags(GPT_OSS), in_reasoning=False, tools=found.markers, silent=found.silent
            )
            text = head + tail
            spans = [s for i in range(0, len(text), cuts) for s in scanner.feed(text[i : i + cuts])]
            joined: list[tuple[Channel, str]] = []
            for span in (*spans, *scanner.finish(turn_ended=True)):
                if joined and joined[-1][0] is span.channel:
                    joined[-1] = (span.channel, joined[-1][1] + span.text)
                else:
                    joined.append((span.channel, span.text))
            assert joined == [(Channel.REASONING, "Let me see."), *wanted]
