"""The wire structs and the schemas describe the same values, seen from both sides."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from contract.validators import definitions, schema_errors, schemas, validate
from kiln import contracts
from kiln.http.openapi import agreement
from kiln.wire import kiln as wire

INFERENCE = schemas()[contracts.INFERENCE]
EXAMPLES: dict[str, list[Any]] = INFERENCE["x-kiln-examples"]
RULES = {"not", "if", "then", "else", "anyOf", "const", "unevaluatedProperties"}


DIFFERENCES = agreement.check()


@pytest.mark.parametrize("definition", sorted(DIFFERENCES))
def test_every_definition_agrees_with_its_struct(definition: str) -> None:
    assert DIFFERENCES[definition] == []


def test_every_struct_and_every_definition_was_compared() -> None:
    compared = set(DIFFERENCES)
    assert set(definitions()) <= compared
    stands_for = {agreement.type_of(name) for name in compared if name not in ("request", "serverDefaults")}
    parts = {wire.SampledActionTokenV1, wire.ForcedActionTokenV1}
    assert {getattr(wire, name) for name in agreement.struct_names()} <= stands_for | parts


@pytest.mark.parametrize("file", sorted(schemas()))
def test_schemas_are_valid_and_closed_over_their_references(file: str) -> None:
    schema = schemas()[file]
    Draft202012Validator.check_schema(schema)
    for reference in references(schema):
        target, _, name = reference.partition("#/$defs/")
        assert name in schemas()[target or file]["$defs"], reference


def test_ids_stand_beside_each_other() -> None:
    ids = [schema["$id"] for schema in schemas().values()]
    assert {i.rsplit("/", 1)[1] for i in ids} == set(schemas())
    assert len({i.rsplit("/", 1)[0] for i in ids}) == 1


def test_every_definition_is_described() -> None:
    for schema in schemas().values():
        for name, definition in schema["$defs"].items():
            assert definition.get("description"), name
            for field, value in definition.get("properties", {}).items():
                assert value.get("description") or "$ref" in value, f"{name}.{field}"


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


Change = Callable[[dict[str, Any]], object]
CHANGES: list[tuple[str, Change]] = [
    ("Usage", lambda d: d["required"].remove("total_tokens")),
    ("Usage", lambda d: d.pop("additionalProperties")),
    ("Usage", lambda d: d["properties"].update(cached_tokens={"type": "integer"})),
    ("Usage", lambda d: d["properties"].pop("total_tokens")),
    ("Delta", lambda d: d["required"].append("role") if "required" in d else d.update(required=["role"])),
    ("Delta", lambda d: d["properties"].update(content={"type": ["string", "null"]})),
    ("ChatCompletionRequest", lambda d: d.update(additionalProperties=False)),
    ("ChatCompletionRequest", lambda d: d["properties"]["n"]["oneOf"][1].update(maximum=63)),
    ("ChatCompletionRequest", lambda d: d["properties"]["stream"].update(default=True)),
    ("ChatCompletionRequest", lambda d: d["properties"].update(model={"type": "string"})),
    ("ChatCompletionMetadata", lambda d: d["properties"]["thinking_source"]["enum"].append("client")),
    ("ChatCompletionMetadata", lambda d: d["properties"]["thinking_source"]["enum"].remove("custom")),
    ("ChatCompletionResponse", lambda d: d["properties"]["id"].update(pattern="^chat-")),
    ("ChatCompletionResponse", lambda d: d["properties"]["choices"].update(maxItems=65)),
    ("ChatCompletionResponse", lambda d: d["properties"]["object"].update(const="chat.completions")),
    ("StreamingTokenTiming", lambda d: d["properties"]["blocking_phase"]["enum"].remove(None)),
    ("RolloutSamplingConfigV1", lambda d: d["properties"]["repetition_penalty"].pop("exclusiveMinimum")),
    ("RolloutActionTokenV1", lambda d: d["oneOf"].pop()),
    ("PromptLogprobMap", lambda d: d["propertyNames"].update(pattern="^[a-z]+$")),
    ("NullableUint64", lambda d: d["oneOf"][1].update(maximum=2**64)),
]


@pytest.mark.parametrize(("definition", "change"), CHANGES)
def test_any_change_of_the_schema_is_a_difference(
    definition: str, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = copy.deepcopy(schemas())
    change(changed[contracts.INFERENCE]["$defs"][definition])
    monkeypatch.setattr(agreement, "_schema", changed.__getitem__)
    assert agreement.differences(definition) != []


@pytest.mark.parametrize("definition", sorted(EXAMPLES))
def test_examples_hold_and_survive_the_structs(definition: str) -> None:
    for example in EXAMPLES[definition]:
        assert validate(definition, example) == []
        value = msgspec.json.decode(json.dumps(example), type=agreement.type_of(definition))
        if not definition.endswith("Request"):
            assert json.loads(msgspec.json.encode(value)) == example


# Integral floats are left out: JSON Schema counts 1.0 as an integer, the server does not.
JUNK: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    65,
    1.5,
    -0.5,
    "",
    "x",
    "stop",
    "a\nb",
    [],
    {},
    [1],
    [None],
    2**32,
]


def mutants(example: Any, seed: int, count: int) -> Iterator[Any]:
    """Copies of an example, each with one or two values removed, replaced or added."""
    rng = random.Random(seed)
    for _ in range(count):
        mutant = copy.deepcopy(example)
        for _ in range(rng.randint(1, 2)):
            places = [p for p in walk(mutant)]
            parent, key = rng.choice(places)
            action = rng.random()
            if action < 0.3:
                del parent[key]
            elif action < 0.4 and isinstance(parent[key], dict):
                parent[key]["unheard_of"] = 1
            else:
                parent[key] = copy.deepcopy(rng.choice(JUNK))
            if not mutant:
                break
        yield mutant


def walk(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from walk(inner)


@pytest.mark.parametrize("definition", sorted(EXAMPLES))
def test_structs_and_schema_decide_alike(definition: str) -> None:
    """On mutated examples the two agree, but where a rule between fields or the u64 bound decides."""
    kind = agreement.type_of(definition)
    accepted = 0
    for number, example in enumerate(EXAMPLES[definition]):
        for mutant in mutants(example, seed=number, count=250):
            try:
                msgspec.json.decode(json.dumps(mutant), type=kind)
                decodes = True
            except msgspec.ValidationError:
                decodes = False
            reasons = list(schema_errors(definition, mutant))
            accepted += decodes
            if decodes:
                # A constant of a response may be absent when decoded: it is always written.
                assert all(
                    e.validator in RULES
                    or (e.validator == "required" and ("'object'" in e.message or "'schema'" in e.message))
                    or "else" in e.schema_path
                    or "then" in e.schema_path
                    for e in reasons
                ), (mutant, reasons)
            else:
                assert reasons, mutant
    assert accepted > 0
