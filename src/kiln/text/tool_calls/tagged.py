"""Qwen3-Coder's format: names and values in tags, types left to the tool's schema."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kiln.text.lark import Lark, either, json_of
from kiln.text.scanner import ToolMarkers
from kiln.text.tool_calls.base import Schemas, ToolCall, ToolFormat, load_json, new_call

NEWLINE = "\n"
END = "\n</parameter>\n"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*\Z", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class Qwen3Coder(ToolFormat):
    """`<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>`."""

    name = "qwen3-coder"
    markers = ToolMarkers("<tool_call>", "</tool_call>")

    def is_used_by(self, template_source: str) -> bool:
        return "<function=" in template_source and "<parameter=" in template_source

    def parse(self, body: str, schemas: Schemas) -> tuple[ToolCall, ...] | None:
        function = _FUNCTION.match(body)
        if function is None:
            return None
        name, inner = function[1].strip(), function[2]
        properties = _properties(schemas.get(name))
        arguments, at = {}, 0
        while (parameter := _PARAMETER.match(inner, at)) is not None:
            key = parameter[1].strip()
            arguments[key] = _value(parameter[2], properties.get(key))
            at = parameter.end()
        if inner[at:].strip():
            return None
        call = new_call(name, arguments)
        return None if call is None else (call,)

    def call_rule(self, name: str, parameters: Mapping[str, Any], lark: Lark) -> str:
        """Parameters in the order of the schema; texts stand bare, up to the closing tag."""
        required = parameters.get("required")
        parts = [lark.text(f"<tool_call>\n<function={name}>\n")]
        for key, schema in _properties(parameters).items():
            value = _value_rule(schema, parameters, lark)
            part = f"{lark.text(f'<parameter={key}>' + NEWLINE)} {value}"
            is_optional = not (isinstance(required, list) and key in required)
            parts.append(f"({part})?" if is_optional else part)
        return " ".join([*parts, lark.text("</function>\n</tool_call>")])


def _value_rule(schema: Any, parameters: Mapping[str, Any], lark: Lark) -> str:
    """The expression of one value and its closing tag."""
    if not _is_text(schema):
        shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
        whole = {**shared, **schema} if isinstance(schema, Mapping) else schema
        return f"{lark.rule(json_of(whole))} {lark.text(END)}"
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if choices is not None:
        texts = [lark.text(choice) for choice in choices if isinstance(choice, str)]
        return f"{either(texts)} {lark.text(END)}"
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    return lark.lexeme(f"/(?s:.{{{low},{high}}})/", suffix=END)


def _properties(schema: Any) -> Mapping[str, Any]:
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _is_text(schema: Any) -> bool:
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    return bool(kinds) and kinds[0] == "string"


def _value(text: str, schema: Any) -> Any:
    """What the text means under the property's schema: a text where one is allowed first, else JSON."""
    if _is_text(schema):
        return text
    bare = text.strip()
    if bare == "null":
        return None
    # Python's words are what these models were trained on.
    value = {"True": True, "False": False, "None": None}.get(bare, load_json(bare))
    return text if value is None and bare != "None" else value
