"""Whether a call fits its tool: the name is one that was offered, the arguments fit its JSON Schema.

Schemas and arguments come from callers and models, so checking is bounded: patterns are of a bounded size and
run under a time limit (a backtracking one could hold the interpreter for ever), and a check gives up after so
many steps.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import regex
from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.validators import extend
from jsonschema_specifications import REGISTRY
from referencing import Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from kiln.core.errors import InvalidField
from kiln.core.text import shorten
from kiln.text.tool_calls.base import Schemas, ToolCall
from kiln.text.tool_calls.patterns import BadPattern, check_pattern

MAX_STEPS = 200_000
PATTERN_SECONDS = 0.1
# Of all patterns of a schema: a tenth of a second to compile.
MAX_PATTERN_PARTS = 100_000
_steps = threading.local()


class _TooCostly(Exception):
    """A check that was given up."""


def schemas_of(tools: Iterable[Any]) -> Schemas:
    """The parameters of each tool by name; tools that have another shape than OpenAI's are left out."""
    found = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            found[function["name"]] = function.get("parameters")
    return found


def refuse_bad_schema(schema: Any, param: str) -> None:
    """Raises InvalidField where a tool's parameters are no JSON Schema of an object."""
    if not isinstance(schema, dict):
        raise InvalidField(f"{param} must be a JSON Schema, an object", param=param)
    problem = _compiled(_key(schema))[1]
    if problem is not None:
        raise InvalidField(f"{param} is not a valid JSON Schema: {problem}", param=param)


def problem_of(call: ToolCall, schemas: Schemas) -> str | None:
    """Why a call does not fit the tools, None when it does. May take a while: not for the event loop."""
    if call.name not in schemas:
        return f"no tool {shorten(call.name)}"
    schema = schemas[call.name]
    if not isinstance(schema, dict):
        return None
    validator, problem = _compiled(_key(schema))
    if validator is None:
        return problem
    _steps.left = MAX_STEPS
    try:
        error = next(iter(validator.iter_errors(json.loads(call.arguments))), None)
    except (_TooCostly, TimeoutError, RecursionError):
        return "the arguments take too long to check"
    except Exception as failure:  # a reference that leads nowhere, a pattern that is none
        return f"the schema cannot be applied: {shorten(failure)}"
    return None if error is None else f"{error.json_path}: {shorten(error.message)}"


def _key(schema: dict[str, Any]) -> str:
    return json.dumps(schema, sort_keys=True)


@lru_cache(maxsize=256)
def _compiled(key: str) -> tuple[Any, str | None]:
    """The validator of a schema, or why there is none."""
    schema = json.loads(key)
    _steps.parts_left = MAX_PATTERN_PARTS
    try:
        Draft202012Validator.check_schema(schema, format_checker=_FORMATS)
        _check_references(schema)
    except SchemaError as error:
        cause = "" if error.cause is None else f" ({error.cause})"
        return None, f"{error.json_path}: {shorten(error.message)}{cause}"
    except Unresolvable as error:
        return None, f"the reference {shorten(error.ref)} leads nowhere; nothing is fetched"
    except RecursionError:
        return None, "it is nested too deeply"
    # The registry has the drafts' own schemas and fetches nothing.
    return _Validator(schema, registry=REGISTRY), None


def _formats() -> FormatChecker:
    """The formats that JSON Schema's own schema names, with regular expressions as they are matched here."""
    checker = FormatChecker(Draft202012Validator.FORMAT_CHECKER.checkers)
    checker.checks("regex", raises=BadPattern)(_is_pattern)
    return checker


def _is_pattern(value: object) -> bool:
    if isinstance(value, str):
        _steps.parts_left -= check_pattern(value)
        if _steps.parts_left < 0:
            raise BadPattern(f"the patterns of the schema come to more than {MAX_PATTERN_PARTS} parts")
    return True


_FORMATS = _formats()


def _check_references(schema: Any) -> None:
    """Raises Unresolvable for a reference to what is not inside the schema."""
    resource = Resource.from_contents(schema, default_specification=DRAFT202012)
    resolver = REGISTRY.resolver_with_root(resource)
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                resolver.lookup(value["$ref"])
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)


def _matches(pattern: str, text: str) -> bool:
    return regex.search(pattern, text, timeout=PATTERN_SECONDS) is not None


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not _matches(pattern, instance):
        yield ValidationError(f"{shorten(instance)} does not match {shorten(pattern)}")


def _pattern_properties(validator: Any, patterns: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if not isinstance(instance, dict):
        return
    for pattern, inner in patterns.items():
        for key, value in instance.items():
            if _matches(pattern, key):
                yield from validator.descend(value, inner, path=key, schema_path=pattern)


def _counted(keyword: Callable[..., Any], *arguments: Any) -> Any:
    _steps.left -= 1
    if _steps.left < 0:
        raise _TooCostly
    return keyword(*arguments)


_Validator = extend(
    Draft202012Validator,
    {
        name: partial(_counted, keyword)
        for name, keyword in {
            **Draft202012Validator.VALIDATORS,
            "pattern": _pattern,
            "patternProperties": _pattern_properties,
        }.items()
    },
)
