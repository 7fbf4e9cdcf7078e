from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiln.text.scanner import ToolMarkers
from kiln.text.tool_calls import find_tool_markers, parse_tool_call

from .samples import LLAMA3, QWEN3

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
OBJECTS = st.dictionaries(st.text(), JSON_VALUES, max_size=4)


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


def test_markers_are_found_in_the_template() -> None:
    assert find_tool_markers(QWEN3) == ToolMarkers("<tool_call>", "</tool_call>")
    assert find_tool_markers(LLAMA3) is None
