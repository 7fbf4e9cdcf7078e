"""What of a caller's schema is refused, and which keyword the refusal names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiln.backends.llamacpp import LlamaModel
from kiln.chat.structured.check import GrammarCheck
from kiln.chat.structured.schemas import (
    LISTS,
    MAPS,
    MAX_NESTING,
    MAX_OPTIONAL,
    MAX_PROPERTIES,
    SINGLE,
    UNSUPPORTED,
    make_ready,
)
from kiln.core.errors import InvalidField
from kiln.engine.sampling.grammar import GrammarCompiler
from kiln.text.lark import json_of
from servers.server import FIXTURES

from .letters import Letters, spell

COMPILER = GrammarCompiler(Letters(), kept=1)
P = "response_format.json_schema.schema"


@pytest.fixture(scope="module")
def grammars() -> Iterator[GrammarCheck]:
    check = GrammarCheck(LlamaModel(Path(FIXTURES / "multi-close.gguf"), vocabulary_only=True))
    yield check
    check.close()


@pytest.fixture(scope="module")
def letters() -> Iterator[GrammarCheck]:
    check = GrammarCheck(Letters())
    yield check
    check.close()


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def patterns(count: int) -> list[dict[str, Any]]:
    return [{"type": "string", "pattern": f".{{{i}}}[a-c].*"} for i in range(count)]


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}


REFUSED: list[tuple[Any, str, str]] = [
    (5, "", "must be a schema"),
    (None, "", "must be a schema"),
    ([], "", "must be a schema"),
    (False, "", "nothing satisfies"),
    ({"properties": {"a": 7}}, ".properties.a", "must be a schema"),
    ({"properties": 5}, ".properties", "object"),
    ({"type": "strin"}, ".type", "strin"),
    ({"type": "array", "uniqueItems": True}, ".uniqueItems", "enforced"),
    ({"items": {"contains": {}}}, ".items.contains", "enforced"),
    ({"anyOf": [{}, {"not": {}}]}, ".anyOf[1].not", "enforced"),
    ({"prefixItems": [{"if": {}}]}, ".prefixItems[0].if", "enforced"),
    ({"$defs": {"d": {"propertyNames": {}}}}, ".$defs.d.propertyNames", "enforced"),
    ({"additionalProperties": {"dependentRequired": {}}}, ".additionalProperties.dependentRequired", ""),
    ({"patternProperties": {"^a": {"$dynamicRef": "#a"}}}, ".patternProperties.^a.$dynamicRef", ""),
    ({"unevaluatedProperties": False}, ".unevaluatedProperties", "enforced"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, ".oneOf", "overlap"),
    ({"properties": {"a": {"type": "string", "format": "colour"}}}, ".properties.a.format", "colour"),
    ({"items": {"type": "string", "pattern": "("}}, ".items.pattern", "unclosed"),
    ({"type": "string", "pattern": "(?=a)b"}, ".pattern", "look-ahead"),
    ({"type": "string", "pattern": "a" * 3000}, ".pattern", "2000"),
    ({"type": "string", "minLength": "x"}, ".minLength", "minLength"),
    ({"type": "string", "minLength": 5, "maxLength": 3}, ".minLength", "greater"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, ".minimum", "greater"),
    ({"type": "object", "required": "a"}, ".required", "array"),
    ({"enum": 5}, ".enum", "array"),
    ({"enum": []}, "", "Unsatisfiable"),
    ({"$ref": "#/$defs/x"}, ".$ref", "does not exist"),
    ({"items": {"$ref": "https://example.com/s.json"}}, ".items.$ref", "nothing is fetched"),
    ({"$ref": "other.json"}, ".$ref", "nothing is fetched"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, ".$defs.a", "nothing satisfies"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "strin"}}}, ".$defs.a.type", "strin"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "", "incompatible"),
    (nested(MAX_NESTING), "", "deeper"),
    ({"enum": ["x" * 300_000]}, "", "262144"),
    ({**optional(1001), "required": [f"p{i}" for i in range(1001)]}, ".properties", "1000"),
    (optional(999), "", "999 properties may come next"),
    ({"properties": {"a": {"items": optional(481)}}}, ".properties.a.items", "481 properties"),
    ({"items": {"anyOf": [optional(250), optional(250)]}}, ".items", "500 properties"),
    ({"$ref": "#/$defs/a", "$defs": {"a": optional(481)}}, ".$defs.a", "481 properties"),
    # Compiling these would take minutes, or for ever.
    ({"allOf": patterns(40)}, "", "as many as 40 patterns"),
    ({"allOf": [{"properties": {"a": part}} for part in patterns(40)]}, "", "as many as 40 patterns"),
    (
        {
            "$defs": {f"d{i}": {**part, "$ref": f"#/$defs/d{i + 1}"} for i, part in enumerate(patterns(40))},
            "items": {"$ref": "#/$defs/d0"},
        },
        "",
        "as many as 40 patterns",
    ),
    ({"type": "integer", "multipleOf": 999983}, ".multipleOf", "999983"),
    ({"type": "number", "multipleOf": 9.99983}, ".multipleOf", "999983"),
    ({"type": "integer", "multipleOf": 2**62 - 1}, ".multipleOf", "10000 at most"),
    ({"allOf": [{"multipleOf": 103}, {"multipleOf": 101}]}, ".allOf[0].multipleOf", "10403"),
    ({"$ref": "#/kept/one", "kept": {"one": {"multipleOf": 99991}}}, ".kept.one.multipleOf", "99991"),
    ({"const": "\ud800"}, "", "escape"),
]


@pytest.mark.parametrize(("schema", "place", "says"), REFUSED, ids=lambda value: str(value)[:50])
def test_a_refusal_names_the_keyword(grammars: GrammarCheck, schema: Any, place: str, says: str) -> None:
    with pytest.raises(InvalidField) as refused:
        make_ready(schema, P, grammars)
    assert refused.value.param == P + place
    assert says in refused.value.message and refused.value.status == 400
    assert len(refused.value.message) < 400 and "\n" not in refused.value.message
    assert "coerce_one_of" not in refused.value.message


TAKEN: list[Any] = [
    True,
    {},
    {"x-anything": 1, "title": "t", "default": 3, "examples": [{"not": 1}], "$comment": "c"},
    {"type": "array", "uniqueItems": False},
    {"enum": [{"not": {}, "if": 1}]},
    {"properties": {"not": {"type": "string"}, "uniqueItems": {"type": "boolean"}}},
    {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}},
    {"properties": {"self": {"$ref": "#"}}},
    nested(40),
]


@pytest.mark.parametrize("schema", TAKEN, ids=lambda value: str(value)[:50])
def test_what_asserts_nothing_or_is_supported_is_taken(grammars: GrammarCheck, schema: Any) -> None:
    make_ready(schema, P, grammars)


WORDS = sorted({*MAPS, *LISTS, *SINGLE, *UNSUPPORTED})
WORDS += [
    "type",
    "enum",
    "const",
    "required",
    "minimum",
    "multipleOf",
    "maxLength",
    "pattern",
    "format",
    "$id",
]
WORDS += ["minItems", "maxProperties", "$ref", "$schema", "$anchor", "x-guidance", ""]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6)
    | st.sampled_from(
        ["object", "string", "#", "#/$defs/a", "(", "a{9999}", "^$", "date", "\ud800", "/", "%json"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None, max_examples=150)
@given(st.dictionaries(st.sampled_from(WORDS), VALUES, max_size=5), st.booleans())
def test_any_nonsense_is_taken_or_refused_by_name(
    letters: GrammarCheck, schema: dict[str, Any], strict: bool
) -> None:
    try:
        ready = make_ready(schema, P, letters, strict=strict)
    except InvalidField as error:
        assert error.param is not None and error.param.startswith(P)
        assert "\n" not in error.message
    else:
        # What the child took the engine takes.
        COMPILER.state(f"start: {json_of(ready)}").allowed()


def test_a_caller_cannot_steer_the_grammar_compiler(grammars: GrammarCheck) -> None:
    overlapping = {"oneOf": [{"type": "number"}, {"type": "integer"}], "x-guidance": {"coerce_one_of": True}}
    for schema in (overlapping, {"properties": {"a": overlapping}}):
        with pytest.raises(InvalidField):
            make_ready(schema, P, grammars)


def test_strict_closes_what_declares_properties_and_says_nothing_more(grammars: GrammarCheck) -> None:
    declared = {"type": "object", "properties": {"a": {"properties": {"b": {}}}}, "required": ["a"]}
    assert make_ready(declared, P, grammars) == declared
    closed = make_ready(declared, P, grammars, strict=True)
    assert closed == {
        **declared,
        "properties": {"a": {"properties": {"b": {}}, "additionalProperties": False}},
        "additionalProperties": False,
    }
    untouched: list[dict[str, Any]] = [
        {"type": "object"},
        {"properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
        {"properties": {"a": {}}, "patternProperties": {"^x": {}}},
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
    ]
    for as_written in untouched:
        assert make_ready(as_written, P, grammars, strict=True) == as_written


def test_the_schema_of_the_caller_is_left_alone(grammars: GrammarCheck) -> None:
    schema = {"properties": {"a": {"uniqueItems": False, "properties": {}}}, "uniqueItems": False}
    before = str(schema)
    make_ready(schema, P, grammars, strict=True)
    assert str(schema) == before


def test_patterns_apart_are_not_counted_together(grammars: GrammarCheck) -> None:
    apart = {"properties": {f"p{i}": {"type": "string", "pattern": f"^x{i}+$"} for i in range(60)}}
    one_of_many = {"anyOf": [{"type": "string", "pattern": f"^x{i}+$"} for i in range(60)]}
    for schema in (apart, {"allOf": [apart], "title": "wrapped"}, one_of_many):
        assert make_ready(schema, P, grammars) == schema


@pytest.mark.parametrize(
    "schema",
    [
        optional(MAX_OPTIONAL),
        # A required property in the middle ends the first run.
        {**optional(2 * MAX_OPTIONAL + 1), "required": [f"p{MAX_OPTIONAL}"]},
        {**optional(MAX_PROPERTIES), "required": [f"p{i}" for i in range(MAX_PROPERTIES)]},
        {"anyOf": [optional(MAX_OPTIONAL // 2), {**optional(MAX_OPTIONAL // 2), "required": ["p0"]}]},
    ],
)
def test_as_many_properties_as_are_taken_can_be_followed(grammars: GrammarCheck, schema: Any) -> None:
    """Also as a part of something, and one after another."""
    ready = make_ready({"type": "array", "items": schema}, P, grammars)
    state = COMPILER.state(f"start: {json_of(ready)}")
    required = (schema if "required" in schema else {"required": ["p3", "p9"]})["required"]
    text = json.dumps([dict.fromkeys([*required], 7)])
    for token in spell(text):
        assert state.allowed().mask[token]
        state.accept(token)
    assert state.is_complete
