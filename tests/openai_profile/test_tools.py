"""Tool calls: what the model wrote, checked, parsed and streamed; and what users complain of elsewhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kiln.text.tool_calls import FORMATS
from kiln.text.tool_calls.live import LiveCall
from servers.scripted import Stage

from .conftest import ADD, Profile

GREET: dict[str, Any] = {"type": "function", "function": {"name": "greet"}}
TOOLS = [ADD, GREET]
CLOSE = ("</think>", "\n\n")


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def both(profile: Profile, **fields: Any) -> dict[str, Any]:
    """The one choice of a request, which is the same whole and streamed."""
    (whole,) = profile.ask(**fields)["choices"]
    streamed = profile.stream(**fields)
    message = whole["message"]
    assert streamed.content == message.get("content", "")
    assert streamed.reasoning == message.get("reasoning_content", "")
    assert streamed.finish_reason == whole["finish_reason"]
    joined: dict[int, dict[str, Any]] = {}
    for piece in streamed.tool_calls:
        made = joined.setdefault(piece["index"], {"arguments": ""})
        made["name"] = made.get("name") or piece["function"].get("name")
        made["arguments"] += piece["function"].get("arguments", "")
    functions = [made["function"] for made in message.get("tool_calls", [])]
    assert [joined[i] for i in sorted(joined)] == functions
    choice: dict[str, Any] = whole
    return choice


def test_parallel_calls_are_counted_from_zero(acted: Profile, stage: Stage) -> None:
    stage.say("two things", *CLOSE, call("add", '{"a": 1, "b": 2}'), "\n", call("greet", "{}"))
    choice = both(acted, tools=TOOLS)
    assert choice["finish_reason"] == "tool_calls"
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["add", "greet"]
    assert {c["type"] for c in choice["message"]["tool_calls"]} == {"function"}
    assert len({c["id"] for c in choice["message"]["tool_calls"]}) == 2
    streamed = acted.stream(tools=TOOLS)
    assert [c["index"] for c in streamed.tool_calls] == [0, 1]
    assert "content" not in choice["message"]


def test_one_call_where_parallel_calls_are_off(acted: Profile, stage: Stage) -> None:
    stage.say(*CLOSE, call("add", '{"a": 1, "b": 2}'), "\n", call("greet", "{}"), "and text")
    choice = both(acted, tools=TOOLS, parallel_tool_calls=False)
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["add"]
    assert choice["finish_reason"] == "tool_calls" and "content" not in choice["message"]


@pytest.mark.parametrize("as_text", [False, True])
def test_arguments_are_the_text_of_an_object(acted: Profile, stage: Stage, as_text: bool) -> None:
    arguments = '{"b":2,"a":1}'
    stage.say(*CLOSE, call("add", json.dumps(arguments) if as_text else arguments))
    (made,) = both(acted, tools=TOOLS)["message"]["tool_calls"]
    assert isinstance(made["function"]["arguments"], str)
    assert json.loads(made["function"]["arguments"]) == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    "written",
    [
        call("add", '{"a": 1}'),
        call("add", '{"a": "one", "b": 2}'),
        call("add", '{"a": 1, "b": 2, "c": 3}'),
        call("subtract", '{"a": 1, "b": 2}'),
        '<tool_call>\n{"name": "add", "arguments": {"a": 1\n</tool_call>',
        "<tool_call>\nadd 1 and 2\n</tool_call>",
    ],
)
def test_a_call_that_does_not_fit_is_text(acted: Profile, stage: Stage, written: str) -> None:
    stage.say("thought", *CLOSE, "Look: ", written)
    choice = both(acted, tools=TOOLS)
    assert choice["finish_reason"] == "malformed_function_call"
    assert choice["message"]["content"] == f"Look: {written}"
    assert "tool_calls" not in choice["message"]


def test_a_call_that_was_left_open_is_malformed(acted: Profile, stage: Stage) -> None:
    stage.say(*CLOSE, '<tool_call>\n{"name": "add", "arguments": {"a": 1')
    choice = both(acted, tools=TOOLS)
    assert choice["finish_reason"] == "malformed_function_call"
    assert choice["message"]["content"].startswith("<tool_call>")


def test_a_call_that_was_cut_is_text(acted: Profile, stage: Stage) -> None:
    stage.say(*CLOSE, call("add", '{"a": 1, "b": 2}'))
    choice = both(acted, tools=TOOLS, max_tokens=14)
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
    assert choice["message"]["content"].startswith("<tool_call>")


def test_prose_about_calls_inside_thinking_is_no_call(acted: Profile, stage: Stage) -> None:
    prose = "I could write " + call("add", '{"a": 1, "b": 2}') + " here"
    stage.say(prose, *CLOSE, "No.")
    choice = both(acted, tools=TOOLS)
    assert choice["message"]["reasoning_content"] == prose and choice["message"]["content"] == "No."
    assert choice["finish_reason"] == "stop"


def test_reasoning_before_calls_is_kept(acted: Profile, stage: Stage) -> None:
    stage.say("I think, ", "so I call", *CLOSE, call("greet", "{}"))
    message = both(acted, tools=TOOLS)["message"]
    assert message["reasoning_content"] == "I think, so I call" and len(message["tool_calls"]) == 1


def test_usage_comes_with_calls(acted: Profile, stage: Stage) -> None:
    stage.say(*CLOSE, call("greet", "{}"))
    usage = acted.stream(tools=TOOLS).usage
    assert usage["completion_tokens"] == acted.ask(tools=TOOLS)["usage"]["completion_tokens"] > 0


def test_a_closer_split_over_chunks(acted: Profile, stage: Stage) -> None:
    stage.say("think", stage.bytes("</think>"), stage.bytes("\n\n"), "answer")
    choice = both(acted)
    assert choice["message"] == {"role": "assistant", "reasoning_content": "think", "content": "answer"}


def test_no_chunk_of_template_newlines(acted: Profile, stage: Stage) -> None:
    stage.say("think", "</think>", "\n", "\n", "answer")
    assert (
        acted.stream().texts("content") == ["answer"] or "".join(acted.stream().texts("content")) == "answer"
    )
    assert all(text.strip("\n") for text in acted.stream().texts("content"))


def test_a_stop_string_inside_thinking_stops_nothing(acted: Profile, stage: Stage) -> None:
    stage.say("STOP is thought", *CLOSE, "say STOP here")
    choice = both(acted, stop=["STOP"])
    assert choice["message"]["reasoning_content"] == "STOP is thought"
    assert choice["message"]["content"] == "say " and choice["finish_reason"] == "stop"


def test_json_mode_leaves_thinking_on(profile: Profile) -> None:
    body = profile.ask("3+8=? Answer in JSON.", response_format={"type": "json_object"})
    message = body["choices"][0]["message"]
    assert message["reasoning_content"] and isinstance(json.loads(message["content"]), dict)
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_a_grammar_does_not_hold_the_thinking(profile: Profile) -> None:
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "integer"}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    free = profile.ask("3+8=?")["choices"][0]["message"]["reasoning_content"]
    for fields in ({}, {"thinking_budget_tokens": 4}):
        message = profile.ask("3+8=?", response_format=wanted, **fields)["choices"][0]["message"]
        assert set(json.loads(message["content"])) == {"answer"}
        assert free.startswith(message["reasoning_content"])


def test_an_answer_that_mentions_a_call_is_an_answer(acted: Profile, stage: Stage) -> None:
    answer = '{"text": "<tool_call> and </think>"}'
    # In bytes: the grammar keeps whole control tokens out of strings.
    stage.say("thought", *CLOSE, stage.bytes(answer))
    choice = both(acted, tools=TOOLS, response_format={"type": "json_object"})
    assert choice["message"]["content"] == answer and choice["finish_reason"] == "stop"
    stage.say("thought", *CLOSE, call("add", '{"a": 1, "b": 2}'))
    assert both(acted, tools=TOOLS, response_format={"type": "json_object"})["finish_reason"] == "tool_calls"


def test_tools_that_must_not_be_called_are_not_shown(profile: Profile) -> None:
    plain = profile.ask("Add 3 and 4.")
    none = profile.ask("Add 3 and 4.", tools=[ADD], tool_choice="none")
    assert none["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert "tool_calls" not in none["choices"][0]["message"]
    auto = profile.ask("Add 3 and 4.", tools=[ADD], tool_choice="auto")["choices"][0]
    assert auto["finish_reason"] == "tool_calls"


def test_a_tool_loop(profile: Profile) -> None:
    first = profile.ask("Add 3 and 4.", tools=[ADD])["choices"][0]["message"]
    (made,) = first["tool_calls"]
    result = {"role": "tool", "tool_call_id": made["id"], "content": "7"}
    messages = [{"role": "user", "content": "Add 3 and 4."}, first, result]
    second = profile.ask(messages=messages, tools=[ADD])["choices"][0]
    assert second["finish_reason"] == "stop" and "7" in second["message"]["content"]


def test_a_costly_schema_is_given_up(acted: Profile, stage: Stage) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}}
    tool = {"type": "function", "function": {"name": "match", "parameters": parameters}}
    stage.say(*CLOSE, call("match", json.dumps({"a": "a" * 60 + "!"})))
    assert acted.ask(tools=[tool])["choices"][0]["finish_reason"] == "malformed_function_call"


def test_a_tool_may_ask_for_letters_of_any_script(acted: Profile, stage: Stage) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": r"^\p{L}+$"}}}
    tool = {"type": "function", "function": {"name": "match", "parameters": parameters}}
    for text, reason in (("Åse", "tool_calls"), ("R2D2", "malformed_function_call")):
        stage.say(*CLOSE, call("match", json.dumps({"a": text})))
        assert acted.ask(tools=[tool])["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize("tool_format", [f for f in FORMATS if f.framing("add")], ids=lambda f: f.name)
def test_live_arguments_are_the_arguments(tool_format: Any) -> None:
    arguments = '{"a": [1, {"b": "}\\"]"}], "c": "\\\\"}'
    framing = tool_format.framing("add")
    written = framing.before + arguments + framing.after
    opened_by = tool_format.markers.open if written.startswith(tool_format.markers.open) else ""
    for size in (1, 3, 1000):
        live = LiveCall(tool_format, ["adder", "add"])
        body = written.removeprefix(opened_by)
        pieces = [live.feed(body[i : i + size], opened_by) for i in range(0, len(body), size)]
        assert "".join(pieces) == arguments == live.arguments
        assert live.name == "add"
    other = LiveCall(tool_format, ["add"])
    assert other.feed("something else", opened_by) == "" and other.name is None


NAMED = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("prompt", ["Add 3 and 4.", "3+8=?", "Hello!"])
def test_a_call_that_is_asked_for_streams_live(profile: Profile, choice: Any, prompt: str) -> None:
    fields = {"tools": [ADD], "tool_choice": choice, "thinking_budget_tokens": 20}
    (whole,) = profile.ask(prompt, **fields)["choices"]
    assert whole["finish_reason"] == "tool_calls" and whole["message"]["reasoning_content"]
    streamed = profile.stream(prompt, **fields)
    assert streamed.finish_reason == "tool_calls" and streamed.content == ""
    made = whole["message"]["tool_calls"]
    for index, each in enumerate(made):
        pieces = [c["function"] for c in streamed.tool_calls if c["index"] == index]
        assert len(pieces) > 3, "arguments come while they are written"
        arguments = "".join(piece.get("arguments", "") for piece in pieces)
        assert arguments == each["function"]["arguments"]
        assert set(json.loads(arguments)) == {"a", "b"} and pieces[0]["name"] == "add"
    assert {c["index"] for c in streamed.tool_calls} == set(range(len(made)))


def test_one_call_is_asked_for(profile: Profile) -> None:
    fields = {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False}
    (whole,) = profile.ask("Add 3 and 4.", **fields)["choices"]
    assert len(whole["message"]["tool_calls"]) == 1
    assert [c["index"] for c in profile.stream("Add 3 and 4.", **fields).tool_calls if "id" in c] == [0]


def test_a_live_call_that_is_cut(profile: Profile) -> None:
    fields = {"tools": [ADD], "tool_choice": "required", "reasoning_effort": "none", "max_tokens": 18}
    (whole,) = profile.ask("Add 3 and 4.", **fields)["choices"]
    assert whole["finish_reason"] == "length" and "tool_calls" not in whole["message"]
    streamed = profile.post(
        "chat/completions",
        messages=[{"role": "user", "content": "Add 3 and 4."}],
        temperature=0,
        stream=True,
        **fields,
    )
    assert '"finish_reason":"length"' in streamed.text
