"""Tool calls as models write them: finding their markers in a template, and parsing their bodies."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any, NoReturn

from kiln.text.scanner import ToolMarkers

# The Hermes and Qwen family. Others are added here, with a parser of their own.
KNOWN_MARKERS = (ToolMarkers(open="<tool_call>", close="</tool_call>"),)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call the model made. `arguments` is the JSON text of an object."""

    id: str
    name: str
    arguments: str

    def to_openai(self) -> dict[str, Any]:
        """The call in OpenAI's shape."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


def find_tool_markers(template_source: str) -> ToolMarkers | None:
    """The markers a chat template uses for tool calls, None when it names none that kiln can parse."""
    for markers in KNOWN_MARKERS:
        if markers.open in template_source and markers.close in template_source:
            return markers
    return None


def parse_tool_call(body: str) -> ToolCall | None:
    """The call in the text between the markers, None when it is not of the form `{"name", "arguments"}`.

    `arguments` is an object, or a string that holds the JSON of one. It is written anew with its keys in
    order, so the text a client gets is valid JSON whatever spacing the model chose. The id is new.
    """
    call = _load_object(body)
    if call is None:
        return None
    name, arguments = call.get("name"), call.get("arguments")
    if isinstance(arguments, str):
        arguments = _load_object(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    text = _dump(arguments)
    if text is None or _has_surrogate(name):
        return None
    return ToolCall(id=f"call_{secrets.token_hex(12)}", name=name, arguments=text)


def _load_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _dump(value: dict[str, Any]) -> str | None:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        # A lone surrogate has no UTF-8 form; as an escape it survives.
        return json.dumps(value, allow_nan=False) if _has_surrogate(text) else text
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)
