"""How many regular expressions of a JSON Schema a text may have to match at once.

llguidance intersects them before it begins, and the time for that doubles with each: 20 take seconds, 25
minutes, and nothing ends it.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote


def patterns_together(schema: object) -> int:
    """The most `pattern`s and `format`s that meet at one place, or more than that, never less.

    Parts that hold together (`allOf`, `$ref`, a branch, and what stands beside them) may each have its most
    at the same place. Raises RecursionError for endless chains of references.
    """
    return _Count(schema).of(schema)


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
        return all_of + branches + self.of(self._target(schema.get("$ref")))

    def _target(self, reference: object) -> object:
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        place = self._root
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
