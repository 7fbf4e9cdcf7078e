"""Who asks for a constraint that is not enforced is told so, and gets no unconstrained answer."""

from __future__ import annotations

from typing import Any

import pytest

from kiln.dialects.openai import constraints

from .conftest import ADD, Profile

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FOREIGN: dict[str, Any] = {
    "guided_json": {},
    "guided_regex": "[0-9]+",
    "guided_choice": ["yes", "no"],
    "guided_grammar": 'root ::= "a"',
    "structured_outputs": {"choice": ["yes", "no"]},
    "structural_tag": "{}",
    "json_schema": SCHEMA,
    "grammar": 'root ::= "a"',
    "ebnf": 'root ::= "a"',
    "regex": "",
    "allowed_token_ids": [1],
    "bad_words": ["no"],
}
ROUTES: dict[str, dict[str, Any]] = {"chat/completions": {}, "completions": {"prompt": "a"}}


def test_every_foreign_constraint_is_tried() -> None:
    assert set(constraints.FOREIGN) == set(FOREIGN)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_constraint_is_refused_with_what_to_send(profile: Profile, route: str, name: str) -> None:
    error = profile.refuse(route, **ROUTES[route], **{name: FOREIGN[name]})
    assert error["param"] == name and error["code"] == "invalid_field"
    wanted = "logit_bias" if name in ("allowed_token_ids", "bad_words") else "response_format"
    assert wanted in error["hint"]


@pytest.mark.parametrize("value", [None, []])
def test_no_constraint_is_none(profile: Profile, value: Any) -> None:
    fields = dict.fromkeys(FOREIGN, value)
    assert profile.post("completions", prompt="a", max_tokens=1, **fields).status_code == 200
    assert profile.ask(max_tokens=1, **fields)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}),
        ("response_format", {}),
        ("tools", [ADD]),
        ("tool_choice", "auto"),
        ("tool_choice", {"type": "function", "function": {"name": "add"}}),
        ("functions", [ADD["function"]]),
        ("function_call", "auto"),
    ],
)
def test_what_shapes_a_turn_is_refused_for_a_text(profile: Profile, name: str, value: Any) -> None:
    error = profile.refuse("completions", prompt="a", **{name: value})
    assert error["param"] == name and "chat/completions" in error["hint"]


def test_a_text_may_be_asked_for_without_format_and_tools(profile: Profile) -> None:
    response = profile.post(
        "completions",
        prompt="a",
        max_tokens=1,
        response_format={"type": "text"},
        tools=[],
        tool_choice="none",
        functions=[],
        function_call="none",
    )
    assert response.status_code == 200, response.text
