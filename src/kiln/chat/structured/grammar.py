"""From the shape that an answer must have to the grammar that its tokens keep to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kiln.chat.models.served import ServedModel
from kiln.chat.structured.schemas import make_ready
from kiln.core.errors import GrammarFailed, InvalidField
from kiln.core.text import shorten
from kiln.core.turn import AnswerFormat, ChatTurn, ToolPolicy
from kiln.text.lark import Lark, either, json_of
from kiln.text.tool_calls import ToolFormat

# Behind the close of the thinking templates write line breaks, which are no part of the answer.
LEAD = r"/\n{0,3}/"
ANY_OBJECT = {"type": "object"}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def may_open_thought(model: ServedModel, *, in_reasoning: bool, thinks: bool) -> bool:
    """Whether the model opens a thought by itself, before its answer. `thinks`: the template has it think."""
    channels = model.tool_format is not None and model.tool_format.answer_header != ""
    return model.tags is not None and not in_reasoning and (thinks or channels)


def to_grammar(turn: ChatTurn, model: ServedModel, *, in_reasoning: bool, thinks: bool) -> str | None:
    """The grammar of a turn's answer, None where it is free.

    `in_reasoning`: the prompt opened a thought, and the grammar begins when it has closed. A thought that
    the model may open by itself (`thinks`) is a part of the grammar.

    Compiled once in a child process, so that what cannot be enforced is refused before anything runs. Slow
    the first time: for a worker thread. Raises InvalidField.
    """
    policy = turn.tool_policy or ToolPolicy()
    must_call = policy.mode in ("required", "named")
    answer = turn.answer_format
    if answer is None and not must_call:
        return None
    lark = Lark(model.tokenizer)
    shapes = []
    if must_call or (answer is not None and _may_call(turn, policy, model)):
        shapes.append(lark.rule(_calls(turn, policy, model, lark)))
    if answer is not None and not must_call:
        header = "" if model.tool_format is None else model.tool_format.answer_header
        shapes.append(lark.rule(f"{lark.text(header)} {_answer(answer, model)}"))
    thought = _behind_thought(model, lark) if in_reasoning else ""
    if may_open_thought(model, in_reasoning=in_reasoning, thinks=thinks):
        assert model.tags is not None
        opened = f"{lark.text(model.tags.open)} {lark.up_to(model.tags.close)}"
        thought = f"({opened} {_behind_thought(model, lark)})?"
    grammar = lark.write(f"{thought} {either(shapes)}")
    param = "tools" if answer is None or must_call else answer.param
    try:
        model.grammars.check(grammar)
    except GrammarFailed as error:
        raise InvalidField(f"{param}: {error.message}", param=param) from None
    return grammar


def _behind_thought(model: ServedModel, lark: Lark) -> str:
    return f"{LEAD} {lark.text('' if model.tool_format is None else model.tool_format.after_thought)}"


def _answer(answer: AnswerFormat, model: ServedModel) -> str:
    if answer.kind == "json_object":
        return json_of(ANY_OBJECT)
    schema = {} if answer.schema is None else answer.schema
    return json_of(make_ready(schema, answer.param, model.grammars, strict=answer.strict))


def _may_call(turn: ChatTurn, policy: ToolPolicy, model: ServedModel) -> bool:
    """Whether the model may call a tool instead of giving the answer that was asked for."""
    offered = bool(turn.conversation.tools) and turn.conversation.tool_choice != "none"
    return offered and policy.mode != "none" and model.tool_format is not None


def _calls(turn: ChatTurn, policy: ToolPolicy, model: ServedModel, lark: Lark) -> str:
    """The expression of the calls that the policy asks for or admits."""
    known = _format(model)
    calls = []
    for place, tool in enumerate(turn.conversation.tools):
        function, path = _function(tool, f"tools[{place}]")
        if policy.mode != "named" or function["name"] == policy.name:
            parameters = _parameters(function, path, policy, model)
            calls.append(known.call_rule(function["name"], parameters, lark))
    if not calls:
        raise InvalidField(
            "a tool call is asked for, but no tool is offered"
            if policy.name is None
            else f"the tool {shorten(policy.name)} is not among the tools",
            param="tool_choice",
            hint="Offer the tool in `tools`, or set tool_choice to auto.",
        )
    return known.calls_rule(calls, lark, many=policy.parallel and policy.mode != "named")


def _format(model: ServedModel) -> ToolFormat:
    if model.tool_format is None:
        raise InvalidField(
            "the model's chat template shows no way to call tools that kiln knows",
            param="tool_choice",
            hint="Set tool_choice to auto or none, or serve a model whose template takes tools.",
        )
    return model.tool_format


def _function(tool: Any, path: str) -> tuple[Mapping[str, Any], str]:
    """A tool's name and parameters, and where they stand: in OpenAI's envelope or bare."""
    nested = isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping)
    function = tool["function"] if nested else tool
    path = f"{path}.function" if nested else path
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise InvalidField(f"{path} needs a name", param=f"{path}.name")
    return function, path


def _parameters(
    function: Mapping[str, Any], path: str, policy: ToolPolicy, model: ServedModel
) -> dict[str, Any]:
    schema = function.get("parameters")
    if schema is None:
        return NO_ARGUMENTS
    path = f"{path}.parameters"
    if not isinstance(schema, dict):
        raise InvalidField(f"{path} must be a JSON Schema, an object", param=path)
    if schema.get("type", "object") != "object":
        raise InvalidField(f"{path}.type: arguments are always an object", param=f"{path}.type")
    try:
        strict = function.get("strict") is True
        ready = make_ready({**schema, "type": "object"}, path, model.grammars, strict=strict)
    except InvalidField:
        if policy.mode in ("required", "named"):
            raise
        # Nothing was promised of the arguments of a call that the model chooses to make.
        return ANY_OBJECT
    assert isinstance(ready, dict)
    return ready
