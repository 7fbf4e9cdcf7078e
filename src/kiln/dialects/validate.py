"""Decoding a request body so that every refusal names its field."""

from __future__ import annotations

import math
import re
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from kiln.core.errors import InvalidField, InvalidJson
from kiln.core.text import shorten

T = TypeVar("T", bound=msgspec.Struct)

_PATH = re.compile(r" - at `\$\.?(?P<path>.*)`$")
_CHOICE = re.compile(r"^Invalid enum value (?P<value>.*)$", re.DOTALL)
_STEP = re.compile(r"\[[^\]]*\]|[^.\[]+")
_MISSING = re.compile(r"missing required field `(?P<field>[^`]+)`")


def decode(body: bytes, kind: type[T]) -> T:
    """Decode a JSON body into a wire struct. Raises InvalidJson, or InvalidField naming the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), kind) from None
    except RecursionError:
        raise InvalidJson("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidJson(f"the body is not valid JSON: {error}") from None


def convert(values: Any, kind: type[T]) -> T:
    """The same of values that are decoded already. Raises InvalidField."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), kind) from None


def require_finite(**numbers: float | None) -> None:
    for name, value in numbers.items():
        if value is not None and not math.isfinite(value):
            raise InvalidField(f"{name} must be a finite number", param=name)


def require_range(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise InvalidField(f"{name} must be between {low} and {high}, not {shorten(value)}", param=name)


def _field_error(message: str, kind: type[msgspec.Struct]) -> InvalidField:
    path = _PATH.search(message)
    param = path["path"] if path else None
    problem = message[: path.start()] if path else message
    missing = _MISSING.search(problem)
    choice = _CHOICE.search(problem)
    if missing is not None:
        param = f"{param}.{missing['field']}" if param else missing["field"]
        problem = f"`{param}` is required"
    elif choice is not None and param:
        words, value = ", ".join(_choices(kind, param)), choice["value"].strip("'")
        problem = f"`{param}` must be one of {words}, not {shorten(value)}"
    elif param:
        problem = f"`{param}`: {problem[:1].lower()}{problem[1:]}"
    return InvalidField(problem, param=param or None)


def _choices(kind: type[msgspec.Struct], path: str) -> list[str]:
    """The words that a field takes. `path` as msgspec writes it: `tools[0].type`."""
    kinds = _unfold(inspect.type_info(kind))
    for step in _STEP.findall(path):
        found: list[inspect.Type] = []
        for each in kinds:
            if isinstance(each, inspect.StructType):
                found += (field.type for field in each.fields if field.encode_name == step)
            elif isinstance(each, inspect.ListType) and step.startswith("["):
                found.append(each.item_type)
            elif isinstance(each, inspect.DictType) and step.startswith("["):
                found.append(each.value_type)
        kinds = [part for each in found for part in _unfold(each)]
    return [str(value) for each in kinds if isinstance(each, inspect.LiteralType) for value in each.values]


def _unfold(kind: inspect.Type) -> list[inspect.Type]:
    """The members of a union, and of what only carries a bound or a description."""
    if isinstance(kind, inspect.Metadata):
        return _unfold(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [part for each in kind.types for part in _unfold(each)]
    return [kind]


def text_list(name: str, value: Any) -> tuple[str, ...]:
    """Normalise a null, text or list of texts."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)
