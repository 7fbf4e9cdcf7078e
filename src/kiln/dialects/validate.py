"""Decoding a request body so that every refusal names its field."""

from __future__ import annotations

import json
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
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_PATH = 200
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
        raise _surrogate_error(body) or InvalidJson(f"the body is not valid JSON: {error}") from None


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


def _surrogate_error(body: bytes) -> InvalidJson | None:
    """Half of a surrogate pair in what is JSON otherwise: msgspec's words for it say nothing of that."""
    try:
        found = _find_surrogate(json.loads(body.decode()))
    except (ValueError, RecursionError):
        return None
    if found is None:
        return None
    path, text, is_key = found
    param = path.removeprefix(".")
    if len(param) > _MAX_PATH:
        # It may lead through names of the caller's choosing.
        param = f"{param[: _MAX_PATH - 1]}…"
    where = f"`{param}`" if param else "the body"
    place = f"the name of a member of {where}" if is_key else where
    half = _SURROGATE.search(text)
    assert half is not None
    return InvalidJson(
        f"{place} has half of a surrogate pair, \\u{ord(half[0]):04x}, as character {half.start() + 1}",
        param=param or None,
        hint="Send both halves together, or \\ufffd for what is no character.",
    )


def _find_surrogate(value: Any) -> tuple[str, str, bool] | None:
    """The path of the first text with half a pair, the text, and whether that is a name of a member there."""
    if isinstance(value, str):
        return ("", value, False) if not value.isascii() and _SURROGATE.search(value) else None
    if isinstance(value, list):
        for i, item in enumerate(value):
            if (found := _find_surrogate(item)) is not None:
                return f"[{i}]{found[0]}", *found[1:]
    elif isinstance(value, dict):
        for name, item in value.items():
            if _find_surrogate(name) is not None:
                return "", name, True
            if (found := _find_surrogate(item)) is not None:
                return f".{name}{found[0]}", *found[1:]
    return None


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
