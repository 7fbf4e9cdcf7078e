"""Every order in which events come."""

from __future__ import annotations

from typing import Any

import pytest

from servers.scripted import Stage

from .api import Native
from .test_rounds import call

F = {"name": "f"}
CLOSE = ["</think>", "\n\n"]


@pytest.mark.parametrize(
    ("script", "fields", "names", "reason"),
    [
        pytest.param([], {}, [], "stop", id="nothing"),
        pytest.param(["a"], {}, ["delta thinking"], "stop", id="thoughts that end the turn"),
        pytest.param(["a"] * 9, {"max_tokens": 3}, ["delta thinking"], "length", id="thoughts that are cut"),
        pytest.param([*CLOSE, "x"], {}, ["delta text"], "stop", id="no thoughts"),
        pytest.param(["x"], {"reasoning": "none"}, ["delta text"], "stop", id="thinking switched off"),
        pytest.param(["a", *CLOSE, "x"], {}, ["delta thinking", "delta text"], "stop", id="both"),
        pytest.param(
            ["a", "b", "c", "x"],
            {"thinking_budget_tokens": 2},
            ["delta thinking", "delta text"],
            "stop",
            id="thoughts closed by a budget",
        ),
        pytest.param(
            ["a", *CLOSE, "x"],
            {"thinking_budget_tokens": 0},
            ["delta text"],
            "stop",
            id="no room for thoughts",
        ),
        pytest.param(
            ["a", *CLOSE, "xSTOPy"], {"stop": ["STOP"]}, ["delta thinking", "delta text"], "stop", id="stop"
        ),
        pytest.param(
            ["a", *CLOSE, call("f")],
            {"tools": [F]},
            ["delta thinking", "delta tool", "tool_call"],
            "tool_calls",
            id="a call",
        ),
        pytest.param(
            [*CLOSE, "x", "\n", call("f")],
            {"tools": [F]},
            ["delta text", "delta tool", "tool_call"],
            "tool_calls",
            id="text, then a call",
        ),
        pytest.param(
            [*CLOSE, call("f"), "\n", "x"],
            {"tools": [F]},
            ["delta tool", "tool_call", "delta text"],
            "tool_calls",
            id="a call, then text",
        ),
        pytest.param(
            [*CLOSE, call("f"), "\n", call("f")],
            {"tools": [F]},
            ["delta tool", "tool_call", "delta tool", "tool_call"],
            "tool_calls",
            id="two calls",
        ),
        pytest.param(
            [*CLOSE, "<tool_call>\nnonsense\n</tool_call>"],
            {"tools": [F]},
            ["delta tool", "delta text"],
            "stop",
            id="a call that is none",
        ),
        pytest.param(
            [*CLOSE, "<tool_call>\n", "{", "{", "{", "{"],
            {"tools": [F], "max_tokens": 6},
            ["delta tool", "delta text"],
            "length",
            id="a call that is cut",
        ),
        pytest.param(
            [*CLOSE, call("f")],
            {"tools": [F], "tool_choice": "none"},
            ["delta text"],
            "stop",
            id="no call allowed",
        ),
        pytest.param([*CLOSE, call("f")], {}, ["delta text"], "stop", id="no tool offered"),
        pytest.param(
            ["a", "<tool_call>\n{}\n</tool_call>", *CLOSE, "x"],
            {"tools": [F]},
            ["delta thinking", "delta text"],
            "stop",
            id="a call inside thoughts",
        ),
    ],
)
def test_of_one_round(
    scripted: Native, stage: Stage, script: list[Any], fields: dict[str, Any], names: list[str], reason: str
) -> None:
    stage.say(*script)
    stream = scripted.stream(**fields)
    assert stream.names == ["status", *names, "done"]
    assert stream.done["reason"] == reason
    assert stream.text("text") == stream.done["text"]
    # Without a stream the same comes of it.
    whole = scripted.ask(**fields)
    assert whole["result"]["text"] == stream.done["text"]
    assert whole.get("thinking", "") == stream.text("thinking")
    assert len(whole["result"].get("tool_calls", [])) == len(stream.all("tool_call"))


def test_of_a_round_for_each_kind_of_call(scripted: Native, stage: Stage) -> None:
    stage.then("a", *CLOSE, call("activate_skill", name="unit-price"))
    stage.then("a", *CLOSE, "Let me add.", "\n", call("add", a=1, b=2))
    stage.then("a", *CLOSE, call("no_such"))
    stage.then(*CLOSE, call("f"))
    stream = scripted.stream(
        skill="unit-price", skills=["unit-price"], server_tools=["forbidden", "add"], tools=[F]
    )
    first = ["status", "skill", "tool_use", "status", "delta thinking", "delta tool", "skill"]
    second = ["status", "delta thinking", "delta text", "delta tool", "tool_use"]
    third = ["status", "delta thinking", "delta tool", "tool_use"]
    assert stream.names == [*first, *second, *third, "status", "delta tool", "tool_call", "done"]
    assert [e["status"] for e in stream.all("skill")] == ["active", "activated"]
    assert [e["status"] for e in stream.all("tool_use")] == ["denied", "running", "done", "denied"]
    assert (stream.done["reason"], stream.done["rounds"]) == ("tool_calls", 4)
