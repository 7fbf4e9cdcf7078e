"""Whether the wire structs and the contracts' definitions describe the same values.

Both sides are brought to one normal form and compared for equality, so a difference in either
direction shows: fields, required ones, closedness, types, null, enumerations, bounds, defaults.
Rules between fields (`allOf`, `if`, `not`, `anyOf` of required fields) are no struct's to state and are
left out; `dialects` and `thinking.records` check them.

The normal form of a schema is a list of alternatives, each a plain dict; an object that has a
definition of its own stands as its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from kiln import contracts
from kiln.core.settings import Declaration, declarations
from kiln.wire import kiln as wire

Normal = list[dict[str, Any]]

# What stands for each definition that is not a struct of the same name.
_OTHER_TYPES: Mapping[str, Any] = {
    "ChatCompletionChunkStream": str,
    "FinishReason": wire.FinishReasonName,
    "NonNegativeInteger": wire.NonNegative,
    "NullableBoolean": bool | None,
    "NullableNonNegativeInteger": wire.NonNegative | None,
    "NullableNonNegativeNumber": wire.Milliseconds | None,
    "NullableSamplingNumber": float | None,
    "NullableString": str | None,
    "NullableTemplateKwargs": dict[str, Any] | None,
    "NullableToolArray": list[Any] | None,
    "NullableUint32": wire.Uint32 | None,
    "NullableUint64": wire.Uint64 | None,
    "PromptLogprobMap": wire.PromptLogprobMap,
    "RolloutActionTokenV1": wire.RolloutActionTokenV1,
    "RolloutIdentityText": wire.IdentityText,
    "SamplingPreset": str | None,
    "Sha256": wire.Sha256,
    "StopInput": str | list[str] | None,
    "ToolCallArray": list[Any],
    "UnixSeconds": wire.NonNegative,
    "effective": wire.ThinkingBudgetConfigurationMetadata,
    "limitOverride": wire.NonNegative | None,
    "outcome": wire.ThinkingBudgetOutcome,
    "recentRecord": wire.ThinkingBudgetRecentRecord,
    "record": wire.ThinkingBudgetRecord,
    "source": wire.SourceName,
    "trigger": wire.TriggerName,
}
# Structs whose definition is a part of a larger one.
_PARTS = (wire.SampledActionTokenV1, wire.ForcedActionTokenV1)

_KEPT = (
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "minLength",
    "maxLength",
    "pattern",
    "minItems",
    "maxItems",
    "maxProperties",
)
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


def check() -> dict[str, list[str]]:
    """Every definition of both schemas, sorted by name within its file, with its differences."""
    found = {name: differences(name) for file in _files() for name in sorted(_schema(file)["$defs"])}
    for struct, definition in _named().items():
        if definition not in found:
            found[struct] = ["no definition describes this struct"]
    return found


def differences(definition: str) -> list[str]:
    """Where the definition and its type differ, one line each; [] when they agree."""
    if definition == "serverDefaults":
        return _server_defaults()
    if definition == "request":
        return _request_fields()
    kind = type_of(definition)
    if kind is None:
        return ["no struct stands for this definition"]
    # Both are the same five fields; only the thinking contract's may be composed further.
    closed = True if definition == "effective" else None
    ours = _Contract(_file_of(definition), closed).of_definition(definition)
    theirs = _Types().of_type(kind)
    return list(_compare(definition, ours, theirs))


def type_of(definition: str) -> Any:
    """The struct or type that stands for a definition; None when there is none."""
    if definition in _OTHER_TYPES:
        return _OTHER_TYPES[definition]
    return getattr(wire, definition, None)


def struct_names() -> list[str]:
    """Names of all structs that the Kiln dialect sends or receives."""
    return [
        name
        for name in wire.__all__
        if isinstance(getattr(wire, name), type) and issubclass(getattr(wire, name), msgspec.Struct)
    ]


def definitions_with_struct() -> frozenset[str]:
    """Definitions that one struct stands for."""
    return frozenset(_named().values()) | {"effective"}


@cache
def _named() -> dict[str, str]:
    """Struct name -> definition name."""
    named = {name: name for name in struct_names() if getattr(wire, name) not in _PARTS}
    for definition, kind in _OTHER_TYPES.items():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and definition != "effective":
            named[kind.__name__] = definition
    return named


def _files() -> tuple[str, str]:
    return contracts.INFERENCE, contracts.THINKING_BUDGET


@cache
def _schema(file: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(contracts.load(file))
    return loaded


def _file_of(definition: str) -> str:
    return next(file for file in _files() if definition in _schema(file)["$defs"])


class _Contract:
    """Normal forms of the contract's side. `closed` overrides closedness of the outermost object."""

    def __init__(self, file: str, closed: bool | None = None) -> None:
        self._file = file
        self._closed = closed

    def of_definition(self, name: str) -> Normal:
        normal = self.of(_schema(self._file)["$defs"][name])
        if self._closed is not None:
            normal = [{**a, "closed": self._closed} for a in normal]
        return normal

    def of(self, schema: dict[str, Any]) -> Normal:
        if "$ref" in schema:
            file, name = self._target(schema["$ref"])
            target = _schema(file)["$defs"][name]
            if name in _named().values() and "oneOf" not in target:
                return [{"definition": name}]
            return _Contract(file).of(target)
        if "oneOf" in schema:
            return [a for part in schema["oneOf"] for a in self.of(part)]
        if "allOf" in schema or "properties" in schema:
            return [self._object(schema)]
        return _plain(schema, self.of)

    def _object(self, schema: dict[str, Any]) -> dict[str, Any]:
        properties: dict[str, Any] = {}
        required: set[str] = set()
        self._collect(schema, properties, required)
        closed = schema.get("additionalProperties") is False or schema.get("unevaluatedProperties") is False
        return {
            "type": "object",
            "properties": {name: self.of(value) for name, value in properties.items()},
            "defaults": {name: value["default"] for name, value in properties.items() if "default" in value},
            "required": sorted(required),
            "closed": closed,
        }

    def _collect(self, schema: dict[str, Any], properties: dict[str, Any], required: set[str]) -> None:
        """Fields of an object and of what it is composed of; conditions add none."""
        if "$ref" in schema:
            file, name = self._target(schema["$ref"])
            schema = _schema(file)["$defs"][name]
        properties.update(schema.get("properties", {}))
        required.update(schema.get("required", ()))
        for part in schema.get("allOf", ()):
            if "if" not in part and "not" not in part:
                self._collect(part, properties, required)

    def _target(self, reference: str) -> tuple[str, str]:
        file, _, pointer = reference.partition("#/$defs/")
        return file or self._file, pointer


class _Types:
    """Normal forms of the structs' side, out of what msgspec knows of them."""

    def of_type(self, kind: Any) -> Normal:
        (schema,), self._components = msgspec.json.schema_components([kind], ref_template="{name}")
        if "$ref" in schema:
            return [self._struct(schema["$ref"])]
        return self._of(schema)

    def _of(self, schema: dict[str, Any]) -> Normal:
        if "$ref" in schema:
            name = schema["$ref"]
            return [{"definition": _named()[name]}] if name in _named() else [self._struct(name)]
        if "anyOf" in schema:
            return [a for part in schema["anyOf"] for a in self._of(part)]
        return _plain(schema, self._of)

    def _struct(self, name: str) -> dict[str, Any]:
        component = self._components[name]
        closed = component.get("additionalProperties") is False
        properties = {field: self._of(value) for field, value in component["properties"].items()}
        required = set(component.get("required", ()))
        defaults = {}
        for field, value in component["properties"].items():
            default = value.get("default")
            if closed and default is not None and properties[field][0].get("enum") == [default]:
                required.add(field)  # a constant of a response is always written
            elif default is not None:
                defaults[field] = default
        return {
            "type": "object",
            "properties": properties,
            "defaults": defaults,
            "required": sorted(required),
            "closed": closed,
        }


def _plain(schema: dict[str, Any], of: Any) -> Normal:
    """Alternatives of a schema without references or composition."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        by_type: dict[str, list[Any]] = {}
        for value in values:
            by_type.setdefault(_JSON_TYPES[type(value)], []).append(value)
        return [
            {"type": kind} if kind == "null" else {"type": kind, "enum": sorted(group)}
            for kind, group in by_type.items()
        ]
    kinds = schema.get("type")
    if kinds is None:
        return [{"type": "any"}]
    alternatives = []
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        alternative: dict[str, Any] = {"type": kind}
        alternative.update({key: schema[key] for key in _KEPT if key in schema})
        if kind == "array":
            alternative["items"] = of(schema.get("items", {}))
        if kind == "object":
            more = schema.get("additionalProperties", {})
            alternative["values"] = of({} if more is True else more)
            if "propertyNames" in schema:
                alternative["keys"] = schema["propertyNames"]["pattern"]
        alternatives.append(alternative)
    return alternatives


def _compare(where: str, ours: Normal, theirs: Normal) -> list[str]:
    if len(ours) == len(theirs) == 1 and "properties" in ours[0] and "properties" in theirs[0]:
        return _compare_objects(where, ours[0], theirs[0])
    if _canonical(ours) == _canonical(theirs):
        return []
    return [f"{where}: contract {_show(ours)}, struct {_show(theirs)}"]


def _compare_objects(where: str, ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    found = []
    mine, other = ours["properties"], theirs["properties"]
    found += [f"{where}.{name}: only in the contract" for name in mine if name not in other]
    found += [f"{where}.{name}: only in the struct" for name in other if name not in mine]
    for name in mine.keys() & other.keys():
        found += _compare(f"{where}.{name}", mine[name], other[name])
    for key in ("required", "closed", "defaults"):
        if ours[key] != theirs[key]:
            found.append(f"{where}: {key} in the contract {ours[key]}, in the struct {theirs[key]}")
    return sorted(found)


def _canonical(value: Any) -> str:
    """Text that is equal for equal normal forms: alternatives are a set."""

    def order(v: Any) -> Any:
        if isinstance(v, dict):
            return {k: order(x) for k, x in v.items()}
        if isinstance(v, list):
            return sorted((order(x) for x in v), key=lambda x: json.dumps(x, sort_keys=True))
        return float(v) if isinstance(v, int) and not isinstance(v, bool) and abs(v) < 2**53 else v

    return json.dumps(order(value), sort_keys=True)


def _show(normal: Normal) -> str:
    return json.dumps(normal, ensure_ascii=False)


def _request_fields() -> list[str]:
    """The overrides, as each request struct has them."""
    ours = _Contract(contracts.THINKING_BUDGET).of_definition("request")[0]
    found = []
    for kind in (wire.ChatCompletionRequest, wire.BatchCompletionRequest):
        theirs = _Types().of_type(kind)[0]
        for name, normal in ours["properties"].items():
            found += _compare(f"{kind.__name__}.{name}", normal, theirs["properties"].get(name, []))
            # Absent must be told from null, so neither may be a default.
            if name in theirs["required"] or name in theirs["defaults"]:
                found.append(f"{kind.__name__}.{name}: must be optional and without a default value")
    if ours["required"] or ours["closed"]:
        found.append("request: must be open, and nothing in it required")
    return found


def _server_defaults() -> list[str]:
    """The settings that hold the server's limits."""
    schema = _schema(contracts.THINKING_BUDGET)["$defs"]["serverDefaults"]
    settings: dict[str, Declaration] = {
        d.key: d for d in declarations().values() if d.section == "server" and "thinking_budget" in d.key
    }
    ours = _Contract(contracts.THINKING_BUDGET).of_definition("serverDefaults")[0]["properties"]
    found = [f"serverDefaults.{name}: only on one side" for name in ours.keys() ^ settings.keys()]
    for name in ours.keys() & settings.keys():
        declared = settings[name]
        numbers = [a for a in ours[name] if a["type"] == "integer"]
        agrees = (
            declared.kind is int
            and declared.unlimited
            and declared.default is None
            and numbers == [{"type": "integer", "minimum": declared.low}]
            and schema["x-kiln-environment"][name] == declared.environment_name
        )
        if not agrees:
            found.append(f"serverDefaults.{name}: contract {_show(ours[name])}, setting {declared}")
    return found
