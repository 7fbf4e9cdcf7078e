"""Calls that a grammar guarantees: in every family's format, held to the schemas of the tools."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from kiln.backends.llamacpp import LlamaModel
from kiln.chat.models.served import ServedModel
from kiln.chat.structured.check import GrammarCheck
from kiln.chat.structured.grammar import to_grammar
from kiln.core.completion import ChoiceEnd
from kiln.core.errors import InvalidField
from kiln.core.messages import Conversation
from kiln.core.sampling import SamplingOverrides
from kiln.core.tokens import FinishReason
from kiln.core.turn import AnswerFormat, ChatTurn, ToolPolicy
from kiln.engine.sampling.grammar import GrammarCompiler
from kiln.text.lark import Lark
from kiln.text.reasoning import ReasoningTags
from kiln.text.tool_calls import FORMATS, ToolCall, ToolFormat
from kiln.text.tool_calls.channels import Harmony
from kiln.text.tool_calls.json_formats import Hermes, Llama3, Mistral, MistralNamed
from kiln.text.tool_calls.tagged import Qwen3Coder

from .conftest import Chat
from .letters import CALL, EOS, Letters, spell

ADD: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"$ref": "#/$defs/small"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 9}},
}
FIND: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["kelvin", "celsius"]},
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 7}, "maxItems": 3},
    },
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMAS = {"add": ADD, "find_weather": FIND}
HOT = SamplingOverrides(temperature=1.0, top_k=0, top_p=1.0)


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool(name, parameters) for name, parameters in SCHEMAS.items()]

# The families' formats, over letters.

LETTERS = Letters()
COMPILER = GrammarCompiler(LETTERS)


def grammar_of(known: ToolFormat, *, many: bool) -> str:
    lark = Lark(LETTERS)
    calls = [known.call_rule(name, parameters, lark) for name, parameters in SCHEMAS.items()]
    return lark.write(lark.rule(known.calls_rule(calls, lark, many=many)))


def accepts(grammar: str, text: str) -> bool:
    """Whether the grammar admits this text, letter by letter, and an end behind it."""
    state = COMPILER.state(grammar)
    for token in spell(text):
        if state.is_complete or not state.allowed().mask[token]:
            return False
        state.accept(token)
    return state.is_complete or bool(state.allowed().mask[EOS])


ONE = {
    Hermes: '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 3}}\n</tool_call>',
    Llama3: '{"name": "add", "parameters": {"a": 12, "b": 3}}',
    Mistral: '[TOOL_CALLS][{"name": "add", "arguments": {"a": 12, "b": 3}}]',
    MistralNamed: '[TOOL_CALLS]add[ARGS]{"a": 12, "b": 3}',
    Qwen3Coder: "<tool_call>\n<function=add>\n<parameter=a>\n12\n</parameter>\n"
    "<parameter=b>\n3\n</parameter>\n</function>\n</tool_call>",
    Harmony: '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 12, "b": 3}<|call|>',
}
TWO = {
    Hermes: ONE[Hermes] + "\n" + ONE[Hermes],
    Llama3: ONE[Llama3] + "; " + ONE[Llama3],
    Mistral: ONE[Mistral][:-1] + ", " + ONE[Mistral].removeprefix("[TOOL_CALLS]["),
    MistralNamed: ONE[MistralNamed] * 2,
    Qwen3Coder: ONE[Qwen3Coder] + "\n" + ONE[Qwen3Coder],
    Harmony: ONE[Harmony] + "<|start|>assistant" + ONE[Harmony],
}


@pytest.mark.parametrize("known", FORMATS, ids=lambda known: known.name)
def test_a_family_writes_its_calls_and_nothing_else(known: ToolFormat) -> None:
    one, two = ONE[type(known)], TWO[type(known)]
    single, several = grammar_of(known, many=False), grammar_of(known, many=True)
    assert accepts(single, one) and accepts(several, one) and accepts(several, two)
    assert not accepts(single, two)
    assert not accepts(single, one[:-1]), "no end inside of a call"
    assert not accepts(single, "Well, " + one)
    assert not accepts(single, one.replace("add", "sub"))
    assert not accepts(single, one.replace("12", "120")), "the schema of the tool"
    assert not accepts(single, one.replace("3", "30")), "and what it refers to"


@pytest.mark.parametrize("known", FORMATS, ids=lambda known: known.name)
def test_what_the_grammar_admits_is_what_the_parser_reads(known: ToolFormat) -> None:
    for text, count in ((ONE[type(known)], 1), (TWO[type(known)], 2)):
        bodies = [text]
        if known.markers.close:
            bodies = [part for part in text.split(known.markers.close) if part]
        calls: list[ToolCall] = []
        for body in bodies:
            body = body.removeprefix("\n").removeprefix("<|start|>assistant")
            parsed = known.parse(body.removeprefix(known.markers.open), SCHEMAS)
            assert parsed is not None
            calls += parsed
        assert [(c.name, json.loads(c.arguments)) for c in calls] == [("add", {"a": 12, "b": 3})] * count


def test_qwen3_coder_texts_are_bare_and_optional_ones_may_lack() -> None:
    known = Qwen3Coder()
    single = grammar_of(known, many=False)

    def call(*parameters: str) -> str:
        inner = "".join(f"<parameter={p.replace('=', '>' + chr(10), 1)}\n</parameter>\n" for p in parameters)
        return f"<tool_call>\n<function=find_weather>\n{inner}</function>\n</tool_call>"

    assert accepts(single, call("city=Oslo"))
    assert accepts(single, call("unit=kelvin", 'city=a "b"\n<c>', "days=[1, 7]"))
    assert not accepts(single, call("unit=kelvin")), "a required one lacks"
    assert not accepts(single, call("unit=feet", "city=Oslo"))
    assert not accepts(single, call("city=" + "x" * 13))
    assert not accepts(single, call("city=Oslo", "days=[0]"))
    parsed = known.parse(call("unit=kelvin", "city=Oslo", "days=[1, 7]").split("tool_call>")[1][:-2], SCHEMAS)
    assert parsed is not None
    assert json.loads(parsed[0].arguments) == {"unit": "kelvin", "city": "Oslo", "days": [1, 7]}


@pytest.mark.parametrize("in_reasoning", [True, False])
def test_gpt_oss_writes_channel_headers_around_its_answers(
    bundled: tuple[LlamaModel, ServedModel], in_reasoning: bool
) -> None:
    tags = ReasoningTags("<|channel|>analysis<|message|>", "<|end|>")
    check = GrammarCheck(LETTERS)
    model = replace(
        bundled[1], tokenizer=LETTERS, grammars=check, tool_format=Harmony(), tags=tags, close=None
    )
    number = AnswerFormat("json_schema", {"type": "integer", "minimum": 0, "maximum": 9}, True)
    turn = ChatTurn(Conversation((), tools=tuple(TOOLS)), answer_format=number)
    grammar = to_grammar(turn, model, in_reasoning=in_reasoning, thinks=in_reasoning)
    check.close()
    assert grammar is not None
    answer, call = "<|channel|>final<|message|>7", ONE[Harmony]
    # Behind a thought the answer is a message of its own; where no prompt opened one the model may.
    before = ["<|start|>assistant"] if in_reasoning else ["", f"{tags.open}Hm.{tags.close}<|start|>assistant"]
    for text in (answer, call):
        assert all(accepts(grammar, start + text) for start in before)
    assert not accepts(grammar, answer + "7") and not accepts(grammar, "7")
    assert not accepts(grammar, before[-1] + before[-1] + answer)


def test_a_marker_that_is_one_token_is_named_by_its_id() -> None:
    lark = Lark(LETTERS)
    assert lark.text("a<call>b") == f'"a" <[{CALL}]> "b"'
    # The end of the turn is not the grammar's to write.
    assert lark.text("x<end>") == '"x"' and lark.ends_turn("x<end>") and not lark.ends_turn("<call>")


# The bundled model.


def checked(choice: ChoiceEnd, *, at_least: int = 1) -> list[tuple[str, dict[str, Any]]]:
    """The calls of a choice, after each was found to fit its tool."""
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in choice.tool_calls
    ]
    for name, arguments in calls:
        Draft202012Validator(SCHEMAS[name]).validate(arguments)
    assert len(calls) >= at_least
    assert choice.finish_reason is FinishReason.LENGTH or choice.content == ""
    assert not choice.malformed_call
    return calls


@pytest.mark.parametrize("parallel", [True, False])
async def test_a_required_call_comes_after_the_thinking(
    chat: Chat, multi_close_chat: Chat, parallel: bool
) -> None:
    policy = ToolPolicy("required", parallel=parallel)
    fields: dict[str, Any] = {"tools": TOOLS, "tool_policy": policy, "sampling": HOT, "max_tokens": 150}
    for one in (chat, multi_close_chat):
        choices = await asyncio.gather(*(one.ask(seed=seed, **fields) for seed in range(6)))
        for choice in choices:
            calls = checked(choice)
            assert choice.reasoning
            if not parallel:
                assert len(calls) == 1 and choice.finish_reason is FinishReason.TOOL_CALLS


async def test_a_named_call_is_that_one(chat: Chat) -> None:
    for name in SCHEMAS:
        choice = await chat.ask(tools=TOOLS, tool_policy=ToolPolicy("named", name), budget_tokens=4)
        assert [called for called, _ in checked(choice)] == [name]
        assert choice.finish_reason is FinishReason.TOOL_CALLS


async def test_without_thinking_the_call_begins_at_once(chat: Chat) -> None:
    choice = await chat.ask(
        tools=TOOLS,
        tool_policy=ToolPolicy("required", parallel=False),
        template_kwargs={"enable_thinking": False},
    )
    checked(choice)
    assert not choice.reasoning


@pytest.mark.parametrize("text", ["a</tool_call>b", "</think>", '\\"</tool_call>{', "<tool_call>"])
async def test_markers_in_arguments_are_data(chat: Chat, multi_close_chat: Chat, text: str) -> None:
    schema = {"properties": {"text": {"const": text}}, "required": ["text"], "additionalProperties": False}
    for one in (chat, multi_close_chat):
        choice = await one.ask(tools=[tool("say", schema)], tool_policy=ToolPolicy("named", "say"))
        (call,) = choice.tool_calls
        assert json.loads(call["function"]["arguments"]) == {"text": text}
        assert choice.content == "" and choice.finish_reason is FinishReason.TOOL_CALLS


async def test_a_tool_without_parameters_is_called_with_none(chat: Chat) -> None:
    bare = {"type": "function", "function": {"name": "now"}}
    choice = await chat.ask(tools=[bare], tool_policy=ToolPolicy("named", "now"))
    (call,) = choice.tool_calls
    assert json.loads(call["function"]["arguments"]) == {}


async def test_an_answer_in_a_format_may_be_a_call_instead(chat: Chat) -> None:
    """With tools on offer the grammar leaves the model both; what the first token is decides."""
    number = AnswerFormat("json_schema", {"type": "integer", "minimum": 0, "maximum": 99}, True)
    fields: dict[str, Any] = {"tools": TOOLS, "tool_policy": ToolPolicy("auto"), "answer_format": number}
    (marker,) = chat.model.tokenizer.encode("<tool_call>")
    called = await chat.ask(**fields, logit_bias=((marker, 50.0),), budget_tokens=3)
    answered = await chat.ask(**fields, logit_bias=((marker, -100.0),))
    assert checked(called) and answered.tool_calls == ()
    assert 0 <= json.loads(answered.content) <= 99
    none = await chat.ask(
        **{**fields, "tool_policy": ToolPolicy("none")}, logit_bias=((marker, 50.0),), budget_tokens=3
    )
    assert none.tool_calls == () and 0 <= json.loads(none.content) <= 99


@pytest.mark.parametrize(
    ("tools", "policy", "param"),
    [
        ([], ToolPolicy("required"), "tool_choice"),
        (TOOLS, ToolPolicy("named", "other"), "tool_choice"),
        ([tool("", ADD)], ToolPolicy("required"), "tools[0].function.name"),
        ([TOOLS[0], tool("b", [])], ToolPolicy("required"), "tools[1].function.parameters"),
        ([tool("b", {"type": "string"})], ToolPolicy("required"), "tools[0].function.parameters.type"),
        (
            [tool("b", {"properties": {"x": {"type": "array", "uniqueItems": True}}})],
            ToolPolicy("required"),
            "tools[0].function.parameters.properties.x.uniqueItems",
        ),
        (
            [{"name": "b", "parameters": {"properties": 5}}],
            ToolPolicy("required"),
            "tools[0].parameters.properties",
        ),
    ],
)
async def test_tools_that_cannot_be_enforced_are_refused_by_name(
    chat: Chat, tools: Any, policy: ToolPolicy, param: str
) -> None:
    with pytest.raises(InvalidField) as refused:
        chat.prepare(tools=tools, tool_policy=policy)
    assert refused.value.param == param


async def test_what_the_model_chooses_to_call_is_not_constrained(chat: Chat) -> None:
    prepared = chat.prepare(tools=[tool("b", {"uniqueItems": True})], tool_policy=ToolPolicy("auto"))
    assert not prepared.is_constrained
