"""Messages and tools of a chat request, to what the chat template renders."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from kiln.core.errors import InvalidField
from kiln.core.messages import Message
from kiln.core.text import shorten
from kiln.core.turn import ToolPolicy
from kiln.text.tool_calls.check import refuse_bad_schema
from kiln.wire import openai_chat as wire

# `developer` is what OpenAI calls `system` for its newer models.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NO_PARAMETERS = {"type": "object", "properties": {}}


def read_messages(messages: Sequence[wire.Message]) -> tuple[Message, ...]:
    """Raises InvalidField for roles and content parts that cannot be rendered."""
    if not messages:
        raise InvalidField("messages is empty", param="messages", hint="Send at least one message.")
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def _message(message: wire.Message, where: str) -> Message:
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidField(
            f"{where}.role is {shorten(message.role)}; it must be one of {', '.join(_ROLES)}",
            param=f"{where}.role",
        )
    for name in ("function_call", "audio"):
        if getattr(message, name) is not None:
            raise InvalidField(f"{where}.{name} is not supported", param=f"{where}.{name}")
    if role == "tool" and message.tool_call_id is None:
        raise InvalidField(f"{where}.tool_call_id is required", param=f"{where}.tool_call_id")
    content = _content(message.content, f"{where}.content")
    if role == "assistant" and not content and message.refusal:
        content = message.refusal
    return Message(
        role=role,
        content=content,
        reasoning_content=message.reasoning_content,
        tool_calls=_calls(message.tool_calls, where),
        name=message.name,
        tool_call_id=message.tool_call_id,
    )


def _content(content: str | list[Any] | None, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    key = _TEXTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise InvalidField(
            f"{where}: content parts of type {shorten(kind)} are not supported",
            param=f"{where}.type",
            hint="This model reads text: send parts of type text.",
        )
    text = part.get(key)
    if not isinstance(text, str):
        raise InvalidField(f"{where}.{key} must be a string", param=f"{where}.{key}")
    return text


def _calls(calls: list[Any] | None, where: str) -> tuple[Any, ...] | None:
    if not calls:
        return None
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidField(
                f"{where}.tool_calls[{i}].function.name is required",
                param=f"{where}.tool_calls[{i}].function.name",
            )
    return tuple(calls)


def read_tools(tools: Sequence[wire.Tool] | None) -> tuple[Any, ...]:
    """Tools as plain values. Raises InvalidField for one that is no function or whose schema is none."""
    found: dict[str, Any] = {}
    for i, tool in enumerate(tools or ()):
        where = f"tools[{i}]"
        if tool.type != "function":
            raise InvalidField(
                f"{where}: tools of type {shorten(tool.type)} are not supported", param=f"{where}.type"
            )
        if tool.function is None:
            raise InvalidField(f"`{where}.function` is required", param=f"{where}.function")
        name = tool.function.name
        if not _TOOL_NAME.fullmatch(name):
            raise InvalidField(
                f"{where}.function.name must be 1 to 64 letters, digits, dots, dashes or underscores",
                param=f"{where}.function.name",
            )
        if name in found:
            raise InvalidField(f"two tools are named {name}", param=f"{where}.function.name")
        if tool.function.parameters is not None:
            refuse_bad_schema(tool.function.parameters, f"{where}.function.parameters")
        found[name] = _plain(tool.function)
    return tuple(found.values())


def _plain(function: wire.FunctionDefinition) -> dict[str, Any]:
    stated = {k: v for k, v in msgspec.structs.asdict(function).items() if v is not None}
    return {"type": "function", "function": {"parameters": _NO_PARAMETERS, **stated}}


def read_policy(request: wire.ChatRequest) -> ToolPolicy | None:
    """How the tools may be called; None without tools."""
    choice, names = request.tool_choice, [t.function.name for t in request.tools or () if t.function]
    if not names:
        if choice not in (None, "none", "auto"):
            raise InvalidField("tool_choice asks for a call, but there are no tools", param="tool_choice")
        return None
    parallel = request.parallel_tool_calls is not False
    if isinstance(choice, wire.NamedChoice):
        if choice.function.name not in names:
            raise InvalidField(
                f"tool_choice names {shorten(choice.function.name)}, which is not among the tools",
                param="tool_choice.function.name",
            )
        return ToolPolicy("named", choice.function.name, parallel)
    return ToolPolicy(choice if choice is not None else "auto", None, parallel)
