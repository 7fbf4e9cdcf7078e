"""A skill's questions: declared in its metadata, answered by skill_inputs, shown as data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.core.errors import InvalidField
from kiln.skills.files import Faulty
from kiln.skills.questions import MAX_ANSWER_CHARS, Question, answer, answer_lines
from kiln.skills.skill import parse

from .folders import skill_text

QUESTIONS = (
    Question("shop", "Which shop?", required=True),
    Question("currency", "Which currency?", default="EUR"),
    Question("note", "Anything else?"),
)


def refusal(inputs: dict[str, object]) -> InvalidField:
    with pytest.raises(InvalidField) as caught:
        answer("a-skill", QUESTIONS, inputs)
    assert caught.value.hint
    return caught.value


def test_questions_stand_in_the_metadata_as_json() -> None:
    head = 'metadata:\n  kiln-questions: |\n    [{"slug": "shop", "text": "Which shop?", "required": true}]'
    assert parse(skill_text("a", head), Path("a")).questions == QUESTIONS[:1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", "JSON is malformed"),
        ("{}", "Expected `array`, got `object`"),
        ('[{"text": "x"}]', "missing required field `slug`"),
        ('[{"slug": "a"}]', "missing required field `text`"),
        ('[{"slug": "A", "text": "x"}]', "matching regex"),
        ('[{"slug": "a", "text": ""}]', "length >= 1"),
        ('[{"slug": "a", "text": "x\\ny"}]', "must be one line"),
        ('[{"slug": "a", "text": "x", "default": 5}]', "Expected `str"),
        ('[{"slug": "a", "text": "x", "kind": 5}]', "unknown field `kind`"),
        ('[{"slug": "a", "text": "x"}, {"slug": "a", "text": "y"}]', "the slug `a` stands twice"),
        ('[{"slug": "a", "text": "x", "default": "d", "required": true}]', "its default would never be used"),
        (json.dumps([{"slug": f"q{i}", "text": "x"} for i in range(33)]), "at most 32"),
        ("[" * 5000, "metadata.kiln-questions"),
    ],
)
def test_wrong_declarations_make_the_skill_invalid(text: str, expected: str) -> None:
    with pytest.raises(Faulty) as caught:
        parse(skill_text("a", f"metadata:\n  a: b\n  kiln-questions: {json.dumps(text)}"), Path("a"))
    assert expected in str(caught.value)
    assert {fault.line for fault in caught.value.faults} == {6}


def test_answers_come_in_the_order_of_the_questions_with_defaults() -> None:
    given_ = {"note": "two of them", "shop": "corner"}
    assert list(answer("a", QUESTIONS, given_).items()) == [
        ("shop", "corner"),
        ("currency", "EUR"),
        ("note", "two of them"),
    ]
    assert answer("a", QUESTIONS, {"shop": "x", "currency": "USD"}) == {"shop": "x", "currency": "USD"}


@pytest.mark.parametrize(
    ("value", "text"), [(3, "3"), (1.5, "1.5"), (True, "true"), (False, "false"), (0, "0")]
)
def test_numbers_and_booleans_are_answers(value: object, text: str) -> None:
    assert answer("a", QUESTIONS, {"shop": value})["shop"] == text


@pytest.mark.parametrize("nothing", [{}, {"shop": None}, {"shop": ""}, {"shop": " \n"}])
def test_a_required_question_without_an_answer_is_a_named_refusal(nothing: dict[str, object]) -> None:
    error = refusal(nothing)
    assert error.param == "skill_inputs.shop"
    assert "Which shop?" in error.message


def test_a_blank_answer_takes_the_default() -> None:
    assert answer("a", QUESTIONS, {"shop": "x", "currency": " "})["currency"] == "EUR"


def test_an_unknown_slug_is_a_named_refusal() -> None:
    error = refusal({"shop": "x", "colour": "red"})
    assert error.param == "skill_inputs.colour"
    assert "shop, currency, note" in error.message
    assert "x" * 200 not in str(refusal({"x" * 5000: 1}).param)
    with pytest.raises(InvalidField, match="it asks no questions"):
        answer("a", (), {"shop": "x"})


@pytest.mark.parametrize("value", [[], {}, ["x"], {"a": 1}, "x" * (MAX_ANSWER_CHARS + 1)])
def test_an_answer_of_another_kind_or_size_is_a_named_refusal(value: object) -> None:
    assert refusal({"shop": value}).param == "skill_inputs.shop"


@given(st.text())
def test_an_answer_stays_one_line_of_data(text: str) -> None:
    shown = answer_lines({"a": text, "b": "end"})
    assert len(shown.splitlines()) == 2
    assert json.loads(shown.splitlines()[0].removeprefix("- a: ")) == text
