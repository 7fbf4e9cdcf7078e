"""JSON Schemas of requests: checked, bounded, and made ready for the grammar.

What the grammar cannot hold an answer to is refused by name. Keywords that JSON Schema does not know are
annotations, as the standard has it.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from kiln.chat.structured.check import GrammarCheck
from kiln.chat.structured.conjunctions import optional_together, patterns_together
from kiln.core.errors import InvalidField
from kiln.core.text import shorten
from kiln.text.lark import json_of

Schema = dict[str, Any] | bool

MAX_BYTES = 256 * 1024
# Of the JSON text: a property's schema lies two levels below that of its object.
MAX_NESTING = 100
MAX_PROPERTIES = 1000
# Each property that may come next has four places in a row of the parser, which holds 2,000. It could hold
# more, but finding the next token would then take more than 50 ms, and everybody waits for that.
MAX_OPTIONAL = 480
MAX_PATTERN = 2000
# A grammar of multiples has a state for every remainder, of all steps at once where they must hold together,
# and compiling goes through them all: 999983 takes a quarter of a minute and a gigabyte.
MAX_STEP = 10_000
MAX_TOGETHER = 12
_OVERLAP = "the branches may overlap; use anyOf, or give each a required property with a `const` of its own"
# How long to look for the part of a schema that cannot be compiled.
SEARCH_SECONDS = 1.0

# Assertions that no grammar of ours enforces.
UNSUPPORTED = frozenset(
    {
        *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
        *("uniqueItems", "contains", "minContains", "maxContains", "propertyNames"),
        *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
    }
)
# Their values that assert nothing.
EMPTY = {"uniqueItems": False, "unevaluatedItems": True, "unevaluatedProperties": True}
MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = ("items", "additionalItems", "additionalProperties")
DEFINITIONS = ("$defs", "definitions")


def make_ready(schema: object, param: str, grammars: GrammarCheck, *, strict: bool = False) -> Schema:
    """A caller's schema as the grammar takes it. With `strict` objects admit only what they declare.

    Raises InvalidField that names the keyword, its place under `param`, and what is wrong.
    """
    _check_size(schema, param)
    _check_steps(schema, param)
    _check_meeting(schema, param)
    ready = _rewrite(schema, param, strict=strict, may_close=True)
    if ready is False:
        raise InvalidField(f"{param} is false, which nothing satisfies", param=param)
    problem = _problem(ready, grammars)
    if problem is not None:
        raise _located(ready, param, problem, grammars)
    return ready


def _check_size(schema: object, param: str) -> None:
    level, depth = [schema], 0
    while level:
        if depth > MAX_NESTING:
            raise _refusal(f"it is nested deeper than {MAX_NESTING} levels", param)
        depth += 1
        level = [child for value in level for child in _children(value)]
    size = len(json.dumps(schema))
    if size > MAX_BYTES:
        raise _refusal(f"it has {size} characters, {MAX_BYTES} at most are taken", param)


def _check_steps(schema: object, param: str) -> None:
    """Bound `multipleOf`, wherever it stands: a `$ref` may lead into any part of a schema."""
    common = 1
    waiting = [(schema, param)]
    while waiting:
        value, path = waiting.pop()
        if isinstance(value, list):
            waiting.extend((part, f"{path}[{at}]") for at, part in enumerate(value))
        if not isinstance(value, dict):
            continue
        step = value.get("multipleOf")
        if isinstance(step, int | float) and math.isfinite(step) and step > 0:
            common = math.lcm(common, _digits(step))
            if common > MAX_STEP:
                raise _refusal(
                    f"the steps of the schema come to {common} together, {MAX_STEP} at most are taken "
                    "(decimal point and trailing zeros not counted)",
                    f"{path}.multipleOf",
                )
        waiting.extend((part, f"{path}.{_short(key)}") for key, part in value.items())


def _check_meeting(schema: object, param: str) -> None:
    try:
        together, optional = patterns_together(schema), optional_together(schema)
    except RecursionError:
        raise _refusal("its references lead too deep", param) from None
    if together > MAX_TOGETHER:
        raise _refusal(
            f"as many as {together} patterns and formats may hold together at one place, "
            f"{MAX_TOGETHER} at most are taken",
            param,
        )
    if optional.count > MAX_OPTIONAL:
        raise _refusal(
            f"{optional.count} properties may come next at one place, {MAX_OPTIONAL} at most are taken",
            f"{param}{optional.path}",
            "List more of the properties in `required`, or split the object up; "
            "a run of optional properties ends at the next required one.",
        )


def _digits(number: int | float) -> int:
    """The significant digits of a number above 0: 15 of 0.15 and of 1500."""
    digits = Decimal(number if isinstance(number, int) else repr(number)).as_tuple().digits
    return int("".join(map(str, digits)).rstrip("0"))


def _children(value: object) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _rewrite(schema: object, path: str, *, strict: bool, may_close: bool) -> Schema:
    """A copy with nothing in it that asserts nothing, its parts checked on the way."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise InvalidField(f"{path} must be a schema, an object or a boolean", param=path)
    ready = {key: value for key, value in schema.items() if EMPTY.get(key, ...) is not value}
    ready.pop("x-guidance", None)
    _check_keywords(ready, path)
    for key in MAPS:
        if isinstance(ready.get(key), dict):
            parts = ready[key].items()
            ready[key] = {
                name: _rewrite(part, f"{path}.{key}.{_short(name)}", strict=strict, may_close=True)
                for name, part in parts
            }
    for key in (*LISTS, *SINGLE):
        value = ready.get(key)
        if isinstance(value, list):
            # Branches that must hold together would each refuse what the others declare.
            closing = may_close and key != "allOf"
            ready[key] = [
                _rewrite(part, f"{path}.{key}[{at}]", strict=strict, may_close=closing)
                for at, part in enumerate(value)
            ]
        elif key in SINGLE and key in ready:
            ready[key] = _rewrite(value, f"{path}.{key}", strict=strict, may_close=True)
    if strict and may_close and "properties" in ready and "allOf" not in ready:
        if "patternProperties" not in ready:
            ready.setdefault("additionalProperties", False)
    return ready


def _check_keywords(schema: dict[str, Any], path: str) -> None:
    for key in schema:
        if key in UNSUPPORTED:
            raise _refusal(f"`{key}` cannot be enforced", f"{path}.{key}")
    reference = schema.get("$ref")
    if isinstance(reference, str) and not reference.startswith("#"):
        raise _refusal(
            f"{shorten(reference)} lies outside of the schema; nothing is fetched",
            f"{path}.$ref",
            "Put the schema that is referred to under `$defs`, and refer to it as `#/$defs/…`.",
        )
    properties = schema.get("properties")
    if isinstance(properties, dict) and len(properties) > MAX_PROPERTIES:
        raise _refusal(
            f"an object of {len(properties)} properties; {MAX_PROPERTIES} at most are taken",
            f"{path}.properties",
        )
    for pattern in (schema.get("pattern"), *_keys(schema.get("patternProperties"))):
        if isinstance(pattern, str) and len(pattern) > MAX_PATTERN:
            raise _refusal(f"a pattern of more than {MAX_PATTERN} characters", f"{path}.pattern")


def _keys(value: object) -> list[Any]:
    return list(value) if isinstance(value, dict) else []


def _problem(schema: Schema, grammars: GrammarCheck) -> str | None:
    """Why a schema cannot be compiled, None if it can."""
    problem = grammars.problem(f"start: {json_of(schema)}")
    return _OVERLAP if problem is not None and problem.startswith("oneOf") else problem


def _located(schema: Schema, param: str, problem: str, grammars: GrammarCheck) -> InvalidField:
    """The refusal of the smallest part that cannot be compiled alone."""
    definitions = {key: schema[key] for key in DEFINITIONS if isinstance(schema, dict) and key in schema}
    deadline = time.monotonic() + SEARCH_SECONDS
    for path, part in _parts(schema, param):
        if time.monotonic() > deadline:
            break
        alone = _problem({**definitions, **part}, grammars)
        if alone is not None and not (definitions and _problem({**definitions}, grammars) == alone):
            return _refusal(alone, _keyword_path(path, part, alone))
    return _refusal(problem, param)


def _parts(schema: object, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every part that is a schema with its path, inner ones first."""
    if not isinstance(schema, dict):
        return
    for key in MAPS:
        if isinstance(schema.get(key), dict):
            for name, part in schema[key].items():
                yield from _parts(part, f"{path}.{key}.{_short(name)}")
    for key in (*LISTS, *SINGLE):
        value = schema.get(key)
        if isinstance(value, list):
            for at, part in enumerate(value):
                yield from _parts(part, f"{path}.{key}[{at}]")
        else:
            yield from _parts(value, f"{path}.{key}")
    yield path, schema


# What llguidance says where, and the keyword that it is about.
_ABOUT = (
    (re.compile(r"^Unknown format"), "format"),
    (re.compile(r"regex|look-?around"), "pattern"),
    (re.compile(r"^the branches"), "oneOf"),
    (re.compile(r"^Invalid type"), "type"),
    (re.compile(r"^Pointer|\$ref"), "$ref"),
    (re.compile(r"'(\w+)'"), None),
    (re.compile(r"\b(min\w+|max\w+|multipleOf|required|exclusive\w+|enum|const|properties|anyOf)\b"), None),
)


def _keyword_path(path: str, schema: dict[str, Any], problem: str) -> str:
    for about, keyword in _ABOUT:
        found = about.search(problem)
        if found is not None:
            key = keyword if keyword is not None else found[1]
            if key in schema:
                return f"{path}.{key}"
    return path


def _refusal(problem: str, path: str, hint: str | None = None) -> InvalidField:
    hint = (
        hint or "Leave it out or state it in another way; docs/structured-output.md lists what is enforced."
    )
    return InvalidField(f"{path}: {problem}", param=path, hint=hint)


def _short(name: str) -> str:
    return name if len(name) <= 60 else f"{name[:59]}…"
