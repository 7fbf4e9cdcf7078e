"""How a setting is declared, what its values may be, and how a value is shown."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")

MAX_INT = 2**63 - 1


class BadValue(ValueError):
    """A value that its setting does not allow. The message says what is allowed, nothing else."""


def setting(
    default: T,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] = (),
    unlimited: bool = False,
    secret: bool = False,
) -> T:
    """Declare one setting: `low` and `high` are inclusive bounds, `above` an exclusive one; of a text,
    `high` bounds the length in characters.

    With `unlimited`, the text `unlimited` stands for None. What is `secret` is never shown.
    """
    rules: dict[str, object] = {"low": low, "high": high, "above": above, "choices": choices}
    rules |= {"unlimited": unlimited, "secret": secret}
    return field(default=default, metadata={"doc": doc, **rules})


@dataclass(frozen=True, slots=True)
class Declaration:
    """One setting as declared above. None is allowed if `optional`.

    `kind` is bool, int, float, str, tuple (of texts) or Mapping (of texts, in named tables only).
    """

    section: str
    key: str
    kind: type
    optional: bool
    default: Any
    doc: str
    low: float | None
    high: float | None
    above: float | None
    choices: tuple[str, ...]
    unlimited: bool
    secret: bool

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}"

    @property
    def environment_name(self) -> str:
        return f"KILN_{self.section}_{self.key}".upper()

    @property
    def allowed(self) -> str:
        """What a value may be, in words, as error messages and the documentation say it."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.kind is bool:
            return "true or false"
        if self.kind is str:
            most = "" if self.high is None else f" of at most {self.high:g} characters"
            return f"a text{most}, not empty and without control characters"
        if self.kind is tuple:
            return "a list of texts, none empty or with control characters"
        if self.kind is Mapping:
            return "a table of texts"
        words = "a whole number" if self.kind is int else "a number"
        low, high = (int(n) if n is not None and self.kind is int else n for n in (self.low, self.high))
        if low is not None and high is not None:
            words += f" from {low} to {high}"
        elif low is not None:
            words += f", {low} or more"
        elif self.above is not None:
            words += f" above {self.above:g}" + ("" if high is None else f", {high} at most")
        return words + (", or unlimited" if self.unlimited else "")

    def accept(self, value: object) -> Any:
        """The value to store, or BadValue. Nothing is converted but an int where a float is asked
        and the text `unlimited`, in any letter case, of a setting that has it."""
        if self.unlimited and isinstance(value, str) and value.lower() == "unlimited":
            return None
        if self.kind is float and type(value) is int and abs(value) <= MAX_INT:
            value = float(value)
        if self.kind is tuple:
            return self._accept_texts(value)
        if self.kind is Mapping:
            return self._accept_pairs(value)
        if type(value) is not self.kind or not self._in_range(value):
            raise BadValue(self.allowed)
        return value

    def _accept_texts(self, value: object) -> tuple[str, ...]:
        if not isinstance(value, list | tuple):
            raise BadValue(self.allowed)
        if not all(isinstance(entry, str) and _is_plain(entry, None) for entry in value):
            raise BadValue(self.allowed)
        return tuple(value)

    def _accept_pairs(self, value: object) -> Mapping[str, str]:
        if not isinstance(value, dict):
            raise BadValue(self.allowed)
        for name, text in value.items():
            is_fine = _is_plain(name, None) and isinstance(text, str) and (not text or _is_plain(text, None))
            if not is_fine:
                raise BadValue(self.allowed)
        return MappingProxyType(dict(value))

    def _in_range(self, value: Any) -> bool:
        if self.kind is str:
            return value in self.choices if self.choices else _is_plain(value, self.high)
        if self.kind is bool:
            return True
        # A NaN fails every comparison, so it is asked for by name.
        if not math.isfinite(value) or (self.kind is int and abs(value) > MAX_INT):
            return False
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
        )


def declared_in(section: str, cls: Any) -> list[Declaration]:
    hints = get_type_hints(cls)
    found = []
    for f in dataclasses.fields(cls):
        hint = hints[f.name]
        kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        kind = get_origin(kinds[0]) or kinds[0]
        found.append(Declaration(section, f.name, kind, type(None) in kinds, f.default, **f.metadata))
    return found


def _is_plain(text: str, most: float | None) -> bool:
    # A lone surrogate is how the system hands over bytes that are not UTF-8.
    has_control = any(ord(c) < 0x20 or ord(c) == 0x7F or 0xD800 <= ord(c) < 0xE000 for c in text)
    return text.strip() != "" and not has_control and (most is None or len(text) <= most)


def is_web_address(text: str) -> bool:
    return re.fullmatch(r"https?://[^/\s?#]+([/?][^\s#]*)?", text) is not None


def show_value(value: object) -> str:
    """A value as error messages quote it: JSON where it has a form there, else as Python writes it."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=True)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 200 else text[:197] + "…"
