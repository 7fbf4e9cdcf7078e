"""What of a JSON Schema meets at one place of the answer.

Regular expressions that hold together: llguidance intersects them before it begins, and the time for that
doubles with each: 15 take a minute. Properties that may each come next: a parser follows them all at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote


def patterns_together(schema: object) -> int:
    """The most `pattern`s and `format`s that meet at one place, or more than that, never less.

    Parts that hold together (`allOf`, `$ref`, a branch, and what stands beside them) may each have its most
    at the same place. Raises RecursionError for endless chains of references.
    """
    return _Count(schema).of(schema)


@dataclass(frozen=True, slots=True)
class Crowd:
    """The most properties that may come next at one place, and the path of its schema below the root."""

    count: int
    path: str


def optional_together(schema: object) -> Crowd:
    """As `patterns_together`, of properties; the branches of a choice are followed together too."""
    return _Crowds(schema).most()


class _Crowds:
    def __init__(self, root: object) -> None:
        self._root = root
        self._known: dict[int, int] = {}

    def most(self) -> Crowd:
        most = Crowd(0, "")
        waiting: list[tuple[Any, str]] = [(self._root, "")]
        while waiting:
            part, path = waiting.pop()
            if isinstance(part, list):
                waiting.extend((inner, f"{path}[{at}]") for at, inner in enumerate(part))
            elif isinstance(part, dict):
                count = self.of(part)
                if count > most.count or (count == most.count and len(path) > len(most.path)):
                    most = Crowd(count, path)
                waiting.extend((inner, f"{path}.{key[:60]}") for key, inner in part.items())
        return most

    def of(self, schema: object) -> int:
        if not isinstance(schema, dict):
            return 0
        if id(schema) not in self._known:
            self._known[id(schema)] = 0
            branches = [part for key in ("allOf", "anyOf", "oneOf") for part in _list(schema.get(key))]
            beside = sum(map(self.of, branches)) + self.of(target(self._root, schema.get("$ref")))
            self._known[id(schema)] = _longest_run(schema) + beside
        return self._known[id(schema)]


def _longest_run(schema: dict[str, Any]) -> int:
    """Of properties in their order that may all be left out, with what comes behind them."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return 0
    must = {name for name in _list(required) if isinstance(name, str)}
    longest = run = 0
    for name in properties:
        run = 0 if name in must else run + 1
        longest = max(longest, run)
    return longest


class _Count:
    def __init__(self, root: object) -> None:
        self._root = root
        self._known: dict[int, int] = {}

    def of(self, schema: object) -> int:
        if not isinstance(schema, dict):
            return 0
        if id(schema) not in self._known:
            # A schema inside itself describes a deeper place.
            self._known[id(schema)] = 0
            self._known[id(schema)] = self._own(schema) + self._beside(schema)
        return self._known[id(schema)]

    def _own(self, schema: dict[str, Any]) -> int:
        here = sum(isinstance(schema.get(key), str) for key in ("pattern", "format"))
        children = [schema.get(key) for key in ("items", "additionalItems", "additionalProperties")]
        for key in ("properties", "patternProperties"):
            if isinstance(schema.get(key), dict):
                children += schema[key].values()
        if isinstance(schema.get("prefixItems"), list):
            children += schema["prefixItems"]
        return max([here, *map(self.of, children)])

    def _beside(self, schema: dict[str, Any]) -> int:
        lists = {key: _list(schema.get(key)) for key in ("allOf", "anyOf", "oneOf")}
        all_of = sum(map(self.of, lists["allOf"]))
        branches = sum(max(map(self.of, lists[key]), default=0) for key in ("anyOf", "oneOf"))
        return all_of + branches + self.of(target(self._root, schema.get("$ref")))


def target(root: object, reference: object) -> object:
    """What a `$ref` leads to inside of a schema, None where nothing is there."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    place = root
    for step in unquote(reference).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list):
            found = step.isdecimal() and len(step) < 8 and int(step) < len(place)
            place = place[int(step)] if found else None
        else:
            place = place.get(step) if isinstance(place, dict) else None
    return place


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
