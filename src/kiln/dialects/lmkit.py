"""The `/lmkit/v1` dialect: requests of the native chat, to core values."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from kiln.core.errors import InvalidField
from kiln.core.messages import Conversation, Message, on_system_turn
from kiln.core.native import NativeChat
from kiln.core.sampling import SamplingOverrides
from kiln.core.text import shorten
from kiln.core.turn import AnswerFormat, ChatTurn, ToolPolicy
from kiln.dialects.kiln import to_stops
from kiln.dialects.validate import convert, decode, require_finite
from kiln.text.files import GivenFile, images_refused, with_files
from kiln.wire import lmkit as wire

MAX_BIASES = 1024

# Thinking tokens of the efforts low, medium and high; None is unlimited.
Efforts = Mapping[str, int | None]
# The fields of an agent's name under those that a request states.
Adopt = Callable[[str, dict[str, Any]], dict[str, Any]]


def decode_native(body: bytes, adopt: Adopt) -> wire.NativeChatRequest:
    """Decode a request body and check each field. Every refusal names the field.

    `adopt` looks up the agent that a request names; it raises what is to be told where it cannot.
    """
    request = decode(body, wire.NativeChatRequest)
    if request.agent is not None:
        request = convert(adopt(request.agent, _stated(body)), wire.NativeChatRequest)
    require_finite(
        temperature=request.temperature,
        top_p=request.top_p,
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repeat_penalty=request.repeat_penalty,
    )
    _check_messages(request.messages)
    _check_bias(request.logit_bias or {})
    return request


def _stated(body: bytes) -> dict[str, Any]:
    """The fields that a request states. A null states nothing, but for the budgets."""
    fields: dict[str, Any] = msgspec.json.decode(body)
    return {k: v for k, v in fields.items() if v is not None or k.startswith("thinking_budget_")}


def files_of(request: wire.NativeChatRequest) -> list[list[GivenFile]]:
    """The files of each message."""
    return [
        [GivenFile(file.name, file.mime, file.text, file.data) for file in message.files or ()]
        for message in request.messages
    ]


def to_native(
    request: wire.NativeChatRequest, efforts: Efforts, files: Sequence[str] | None = None
) -> NativeChat:
    """The core value of a checked request; `files` are the texts of each message's files, if any has some.

    Refuses fields that do not go together.
    """
    tools = request.tools or []
    _check_tools(request)
    _check_alternatives(request)
    _check_belonging(request)
    return NativeChat(
        turn=_to_turn(request, efforts, files),
        stream=bool(request.stream),
        client_tools=frozenset(tool.name for tool in tools),
        server_tools=tuple(dict.fromkeys(request.server_tools or ())),
        skill=request.skill,
        skills=tuple(request.skills or ()),
        skill_inputs=request.skill_inputs or {},
        memory=request.memory,
        memory_store=request.memory_store,
    )


def _to_turn(request: wire.NativeChatRequest, efforts: Efforts, files: Sequence[str] | None) -> ChatTurn:
    budget_tokens = request.thinking_budget_tokens
    if budget_tokens is UNSET and request.reasoning is not None:
        # A template that opens the thinking whatever one asks has it closed at once.
        budget_tokens = 0 if request.reasoning == "none" else efforts[request.reasoning]
    return ChatTurn(
        conversation=Conversation(
            messages=_to_messages(request, files),
            tools=tuple(_to_tool(tool) for tool in request.tools or ()),
            tool_choice=_template_choice(request),
            template_kwargs=_template_kwargs(request.reasoning),
        ),
        model=(request.model or "").strip() or None,
        sampling=SamplingOverrides(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=request.repeat_penalty,
        ),
        max_tokens=request.max_tokens,
        budget_tokens=budget_tokens,
        budget_ms=request.thinking_budget_ms,
        stop=to_stops(request.stop),
        seed=request.seed,
        n=request.n if request.n is not None else 1,
        seed_per_choice=True,
        logit_bias=tuple((_bias_key(k), v) for k, v in (request.logit_bias or {}).items()),
        top_logprobs=_top_logprobs(request),
        answer_format=_to_format(request.response_format),
        tool_policy=_to_policy(request),
        narrated=bool(request.stream),
        request_id=request.request_id,
    )


def _template_kwargs(reasoning: str | None) -> dict[str, Any]:
    """Templates either turn thinking on and off or have efforts of their own."""
    if reasoning is None:
        return {}
    if reasoning == "none":
        return {"enable_thinking": False}
    return {"enable_thinking": True, "reasoning_effort": reasoning}


# Messages.


def _check_messages(messages: list[wire.NativeMessage]) -> None:
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if message.role == "tool" and not message.tool_call_id:
            raise InvalidField(
                f"`{where}.tool_call_id` is required in a message of the role tool",
                param=f"{where}.tool_call_id",
                hint="Send the `id` of the tool_call event that the result answers.",
            )
        for field, role in (("tool_call_id", "tool"), ("tool_calls", "assistant"), ("thinking", "assistant")):
            if getattr(message, field) and message.role != role:
                raise InvalidField(
                    f"`{where}.{field}` belongs in a message of the role {role}", param=f"{where}.{field}"
                )
        for j, call in enumerate(message.tool_calls or ()):
            if isinstance(call.arguments, str) and not _is_object(call.arguments):
                name = f"{where}.tool_calls[{j}].arguments"
                raise InvalidField(f"`{name}` is not the JSON text of an object", param=name)
        if message.images:
            raise images_refused(i)
    last = len(messages) - 1
    if messages[last].role not in ("user", "tool"):
        raise InvalidField(
            f"`messages[{last}].role`: the last message must be of the role user or tool, not"
            f" {messages[last].role}",
            param=f"messages[{last}].role",
            hint="End with the message to answer.",
        )


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _to_messages(request: wire.NativeChatRequest, files: Sequence[str] | None) -> tuple[Message, ...]:
    blocks = files if files is not None else [""] * len(request.messages)
    messages = tuple(_to_message(m, block) for m, block in zip(request.messages, blocks, strict=True))
    return on_system_turn(messages, request.system, first=True) if request.system else messages


def _to_message(message: wire.NativeMessage, files: str) -> Message:
    calls = tuple(
        {"id": call.id or f"call_{i}", "type": "function", "function": _to_function(call)}
        for i, call in enumerate(message.tool_calls or ())
    )
    return Message(
        role=message.role,
        content=with_files(files, message.content or ""),
        reasoning_content=message.thinking,
        tool_calls=calls or None,
        name=message.name,
        tool_call_id=message.tool_call_id,
    )


def _to_function(call: wire.NativeCall) -> dict[str, Any]:
    arguments = call.arguments
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return {"name": call.name, "arguments": text}


# Tools.


def _check_tools(request: wire.NativeChatRequest) -> None:
    names = [tool.name for tool in request.tools or ()]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InvalidField(f"`tools[{i}].name`: {name} is there twice", param=f"tools[{i}].name")
        if name in (request.server_tools or ()):
            raise InvalidField(
                f"`tools[{i}].name`: {name} is among server_tools too",
                param=f"tools[{i}].name",
                hint="Name a tool of your own differently.",
            )
    choice = request.tool_choice
    asked = "required" if choice == "required" else getattr(choice, "name", None)
    if asked is None:
        return
    offered = [*names, *(request.server_tools or ())]
    if not offered or (asked != "required" and asked not in offered):
        what = "a tool" if asked == "required" else shorten(asked)
        raise InvalidField(
            f"`tool_choice` asks for {what}, which is not offered",
            param="tool_choice",
            hint="Offer it in `tools` or `server_tools`, or leave tool_choice out.",
        )


def _to_tool(tool: wire.NativeTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    empty = {"type": "object", "properties": {}}
    function["parameters"] = tool.parameters if tool.parameters is not None else empty
    return {"type": "function", "function": function}


def _template_choice(request: wire.NativeChatRequest) -> Any:
    choice = request.tool_choice
    if isinstance(choice, wire.ToolChoiceName):
        return {"type": "function", "function": {"name": choice.name}}
    return choice


def _to_policy(request: wire.NativeChatRequest) -> ToolPolicy | None:
    choice = request.tool_choice
    if not (request.tools or request.server_tools or request.skills):
        return None
    if isinstance(choice, wire.ToolChoiceName):
        return ToolPolicy("named", choice.name, checked=False)
    # A call that does not fit is not held back: its caller, or the tool, says so to the model.
    return ToolPolicy(choice or "auto", checked=False)


# The other fields.


def _check_alternatives(request: wire.NativeChatRequest) -> None:
    if (request.n or 1) == 1:
        return
    for field in ("tools", "server_tools", "skills"):
        if getattr(request, field):
            raise InvalidField(
                f"`n` above 1 does not go with `{field}`", param="n", hint=f"Send n=1, or leave {field} out."
            )


def _check_belonging(request: wire.NativeChatRequest) -> None:
    """Fields that say something about another one, which must be there."""
    for field, needed in (("skill_inputs", "skill"), ("memory_store", "memory")):
        if getattr(request, field) and not getattr(request, needed):
            raise InvalidField(f"`{field}` needs `{needed}`", param=field)


def _check_bias(bias: Mapping[str, float]) -> None:
    if len(bias) > MAX_BIASES:
        raise InvalidField(f"logit_bias holds at most {MAX_BIASES} keys", param="logit_bias")
    for key, value in bias.items():
        require_finite(**{f"logit_bias.{shorten(key, 40)}": value})
        if not key or (key.isdigit() and len(key) > 10):
            raise InvalidField(
                f"`logit_bias`: {shorten(key)} is neither a token id nor a text", param="logit_bias"
            )


def _bias_key(key: str) -> int | str:
    """Digits are a token id, anything else is text."""
    return int(key) if key.isascii() and key.isdigit() else key


def _top_logprobs(request: wire.NativeChatRequest) -> int | None:
    if request.top_logprobs:
        return request.top_logprobs
    return 0 if request.logprobs else None


def _to_format(asked: wire.ResponseFormat | None) -> AnswerFormat | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return AnswerFormat("json_object")
    if asked.json_schema is None:
        raise InvalidField(
            "`response_format.json_schema` is required with the type json_schema",
            param="response_format.json_schema",
        )
    strict, param = bool(asked.json_schema.strict), "response_format.json_schema.schema"
    return AnswerFormat("json_schema", asked.json_schema.schema, strict, param)
