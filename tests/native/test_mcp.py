"""A tool of a real MCP program in the middle of an exchange."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kiln.core.settings import McpServerSettings
from servers.scripted import Stage, staging
from servers.server import settings_of

from .api import Native
from .test_disconnect import is_free, read_until
from .test_rounds import call

PROGRAM = Path(__file__).parents[1] / "tools" / "mcp_good.py"


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Native, Stage]]:
    good = McpServerSettings(command=sys.executable, args=(str(PROGRAM),))
    lost = McpServerSettings(command="/nowhere/program")
    settings = replace(settings_of(tools__allow=("category:mcp",)), mcp={"good": good, "lost": lost})
    with staging(settings) as staged:
        yield Native(staged.server), staged.stage


def test_its_result_reaches_the_model(running: tuple[Native, Stage]) -> None:
    native, stage = running
    stage.then("</think>", call("good__add", a=19, b=23))
    stage.then("</think>", "\n\n", "42.")
    stream = native.stream(server_tools=["good__add", "calc_arithmetic"])
    denied, begun, done = stream.all("tool_use")
    assert (denied["name"], denied["status"]) == ("calc_arithmetic", "denied")
    assert begun == {"name": "good__add", "status": "running", "args": {"a": 19, "b": 23}}
    assert (done["status"], done["result"]) == ("done", "42")
    assert stream.done["text"] == "42."


def test_one_that_cannot_be_started_costs_its_tools_only(running: tuple[Native, Stage]) -> None:
    native, stage = running
    stage.say("</think>", "\n\n", "Well.")
    answer = native.ask(server_tools=["lost__add"])
    assert [(e["name"], e["status"]) for e in answer["tool_events"]] == [("lost__add", "error")]
    assert answer["result"]["text"] == "Well."


def test_a_client_that_goes_frees_it(running: tuple[Native, Stage]) -> None:
    native, stage = running
    stage.then("</think>", call("good__sleep", seconds=600))
    read_until(native, "tool_use", request_id="gone", server_tools=["good__sleep"])
    is_free(native, "gone")
    # The program is there for the next one.
    stage.then("</think>", call("good__add", a=1, b=1))
    stage.then("</think>", "\n\n", "2.")
    assert native.ask(server_tools=["good__add"])["result"]["text"] == "2."
