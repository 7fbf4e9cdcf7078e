"""Parts that the OpenAPI document refers to: error responses out of the error tree, and all schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from kiln import contracts
from kiln.chat.telemetry.stats import LATENCIES
from kiln.core.errors import KilnError, RequestError, ServiceError
from kiln.core.settings import SOURCES, Declaration, declarations
from kiln.http.openapi.openai import openai_schemas
from kiln.http.problems import error_body, native_error_body
from kiln.wire.catalog import AgentList, SkillList
from kiln.wire.lmkit import (
    DeltaEvent,
    NativeChatRequest,
    NativeChatResponse,
    SkipThinking,
    StatusEvent,
)
from kiln.wire.problems import ErrorResponse

Json = dict[str, Any]

# What these refer to is described with them.
NATIVE_BODIES = (NativeChatRequest, NativeChatResponse, SkipThinking, StatusEvent, DeltaEvent)

# Definitions of the thinking contract carry short names there; here they share one list with others.
THINKING_NAMES = {
    "limitOverride": "ThinkingLimitOverride",
    "source": "ThinkingBudgetSource",
    "trigger": "ThinkingBudgetTrigger",
    "request": "ThinkingBudgetRequest",
    "serverDefaults": "ThinkingBudgetServerDefaults",
    "effective": "ThinkingBudgetEffective",
    "outcome": "ThinkingBudgetOutcome",
    "record": "ThinkingBudgetRecord",
    "recentRecord": "ThinkingBudgetRecentRecord",
}


def _errors() -> dict[int, list[type[KilnError]]]:
    """Every error that crosses HTTP, by status."""
    found: dict[int, list[type[KilnError]]] = {}
    waiting: list[type[KilnError]] = [RequestError, ServiceError]
    while waiting:
        kind = waiting.pop(0)
        waiting.extend(kind.__subclasses__())
        if kind not in (RequestError, ServiceError):
            found.setdefault(kind.status, []).append(kind)
    return found


def responses() -> Json:
    """One response for each status, listing its codes, in both error bodies."""
    found = {}
    for status, kinds in sorted(_errors().items()):
        for name, schema, encode in (
            (f"Error{status}", "ErrorResponse", error_body),
            (f"NativeError{status}", "NativeError", native_error_body),
        ):
            examples = {kind.code: {"value": json.loads(encode(kind("…")))} for kind in kinds}
            found[name] = {
                "description": "; ".join(f"`{kind.code}`: {kind.hint}" for kind in kinds),
                "content": {"application/json": {"schema": ref(schema), "examples": examples}},
            }
            if any(kind.retry_after_s is not None for kind in kinds):
                found[name]["headers"] = {
                    "retry-after": {
                        "description": "Seconds to wait.",
                        "schema": {"type": "integer", "minimum": 0},
                        "example": 1,
                    }
                }
    return found


def schemas() -> Json:
    _, structs = msgspec.json.schema_components(
        [ErrorResponse, SkillList, AgentList, *NATIVE_BODIES],
        ref_template="#/components/schemas/{name}",
    )
    found = dict(inference()["$defs"])
    for name, schema in json.loads(contracts.load(contracts.THINKING_BUDGET))["$defs"].items():
        found[THINKING_NAMES[name]] = schema
    # The contracts' own definitions win over structs of the same name.
    found = structs | found
    found |= openai_schemas()
    found |= _own_schemas()
    return {name: _pointing_here(schema) for name, schema in sorted(found.items())}


@cache
def inference() -> Json:
    loaded: Json = json.loads(contracts.load(contracts.INFERENCE))
    return loaded


def _pointing_here(value: Any) -> Any:
    """The same schema with its references turned to this document's components."""
    if isinstance(value, list):
        return [_pointing_here(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    turned = {key: _pointing_here(inner) for key, inner in value.items()}
    reference = turned.get("$ref")
    if isinstance(reference, str):
        name = reference.rsplit("/", 1)[1]
        turned["$ref"] = f"#/components/schemas/{THINKING_NAMES.get(name, name)}"
    return turned


def _own_schemas() -> Json:
    """Bodies that have no struct."""
    model = _object(
        {
            "id": {"type": "string"},
            "object": {"const": "model"},
            "created": {"type": "integer", "minimum": 0},
            "owned_by": {"const": "kiln"},
        }
    )
    models = _object({"object": {"const": "list"}, "data": {"type": "array", "items": ref("Model")}})
    catalog_model = _object(
        {
            "id": {"type": "string"},
            "state": {"enum": ["loaded", "loading", "available"]},
            "default": {"type": "boolean"},
        }
    )
    resolved = {"type": "object", "description": "What the settings came to for the served model."}
    any_object = {"type": "object"}
    return {
        "RecentRequests": _object({"requests": {"type": "array", "items": _recent_request()}}),
        "DecodeStatistics": _decode_statistics(),
        "Accepted": _object({"status": {"const": "accepted"}}),
        "Catalog": _object({"models": {"type": "array", "items": catalog_model}}),
        "Configuration": _object({"settings": _settings(), "resolved": resolved}),
        "ContractDocument": {**any_object, "description": "A JSON Schema, or conformance vectors."},
        "Health": _object({"status": {"enum": ["ok", "draining", "engine_failed", "engine_restarting"]}}),
        "Model": model,
        "ModelList": models,
        "NativeError": _object({"error": {"type": "string"}, "code": {"type": "string"}}),
        "OpenapiDocument": {**any_object, "description": "An OpenAPI 3.1 document."},
    }


def _recent_request() -> Json:
    """One entry of the ring; a turn that was refused has no id and no token counts."""
    count = {"type": "integer", "minimum": 0}
    milliseconds = {"type": ["number", "null"], "minimum": 0}
    properties = {
        "id": {"type": "string"},
        "created": count,
        "model": {"type": "string"},
        "index": count,
        "finish_reason": {"enum": ["stop", "length", "tool_calls", "cancelled", "error"]},
        "error": {"type": "string", "description": "The code of the error it ended with."},
        "prompt_tokens": count,
        "cached_tokens": count,
        "completion_tokens": count,
        "thinking_budget": {
            "type": "object",
            "description": "A recentRecord of the thinking-budget contract.",
        },
        "latency": {
            **_object({**dict.fromkeys(LATENCIES, milliseconds), "stall_count": count}),
            "description": "In milliseconds; null where not measured.",
        },
    }
    required = ["created", "finish_reason", "thinking_budget"]
    return {"type": "object", "properties": properties, "required": required}


def _decode_statistics() -> Json:
    milliseconds = {"type": ["number", "null"], "minimum": 0}
    return _object(
        {
            "window_s": {"type": "number"},
            "gaps": {"type": "integer", "minimum": 0},
            "truncated": {"type": "boolean"},
            **{name: milliseconds for name in ("itl_ms_p50", "itl_ms_p90", "itl_ms_p99", "max_itl_ms")},
        }
    )


def _settings() -> Json:
    """Every setting as it is declared, with the source of its value."""
    sections: dict[str, Json] = {}
    for declared in declarations().values():
        entry = _object(
            {"value": _setting(declared), "source": {"enum": list(SOURCES)}}, description=declared.doc
        )
        sections.setdefault(declared.section, {})[declared.key] = entry
    return _object({name: _object(keys) for name, keys in sections.items()})


def _setting(declared: Declaration) -> Json:
    names: Mapping[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}
    kind = names.get(declared.kind, "array")
    schema: Json = {"type": [kind, "null"] if declared.optional else kind}
    if declared.kind in (int, float):
        bounds = {"minimum": declared.low, "maximum": declared.high, "exclusiveMinimum": declared.above}
        schema |= {key: value for key, value in bounds.items() if value is not None}
    if declared.kind is tuple:
        schema["items"] = {"type": "string"}
    if declared.choices:
        schema["enum"] = [*declared.choices, *([None] if declared.optional else [])]
    return schema


def _object(properties: Json, **more: Any) -> Json:
    """A closed object, all of whose fields are there."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **more,
    }


def ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}
