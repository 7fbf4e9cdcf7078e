"""Calls of server tools and skills are counted by the tool's kind and how they ended, never by name."""

from __future__ import annotations

import asyncio
from typing import Any

from kiln.core.native import ClientCall, NativeEvent
from kiln.native.calls import CallDesk
from kiln.skills.offer import SkillOffer
from kiln.skills.skill import Skill
from kiln.tools.toolbox import Toolbox
from servers.scripted import Stage
from servers.server import wait_until

from .api import Native
from .test_disconnect import read_until
from .test_rounds import call
from .tools import Slow

Counts = dict[tuple[str, str], float]


def counts(native: Native) -> Counts:
    text = native.server.client.get("/metrics").text
    found = {}
    for kind in ("pure", "network", "mcp", "skill", "none"):
        for outcome in ("done", "error", "timeout", "denied", "cancelled"):
            name = f'kiln_tool_calls_total{{kind="{kind}",outcome="{outcome}"}} '
            values = [line.removeprefix(name) for line in text.splitlines() if line.startswith(name)]
            found[kind, outcome] = sum(map(float, values))
    return found


def ran(native: Native, kind: str) -> float:
    text = native.server.client.get("/metrics").text
    name = f'kiln_tool_call_seconds_count{{kind="{kind}"}} '
    return sum(float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name))


def added(native: Native, before: Counts) -> Counts:
    return {key: value - before[key] for key, value in counts(native).items() if value != before[key]}


def test_calls_of_every_sort(scripted: Native, stage: Stage) -> None:
    before, ran_before = counts(scripted), ran(scripted, "pure")
    calls = [call("add", a=1, b=2), call("add", a=1), call("nobodys_tool"), call("forbidden")]
    stage.then("</think>", "\n".join(calls))
    stage.then("</think>", "\n\n", "So.")
    scripted.ask(server_tools=["add"])
    assert added(scripted, before) == {
        ("pure", "done"): 1,
        ("pure", "error"): 1,
        ("none", "denied"): 1,
        ("network", "denied"): 1,
    }
    assert ran(scripted, "pure") == ran_before + 2
    assert "nobodys_tool" not in scripted.server.client.get("/metrics").text


def test_calls_of_skills(scripted: Native, stage: Stage) -> None:
    before = counts(scripted)
    calls = [call("activate_skill", name="unit-price"), call("activate_skill", name="none such")]
    stage.then("</think>", "\n".join(calls))
    stage.then("</think>", "\n\n", "So.")
    scripted.ask(skills=["unit-price"])
    assert added(scripted, before) == {("skill", "done"): 1, ("skill", "error"): 1}


def test_calls_of_the_client_are_not_counted(scripted: Native, stage: Stage) -> None:
    before = counts(scripted)
    stage.then("</think>", call("mine"))
    assert scripted.ask(tools=[{"name": "mine"}])["result"]["reason"] == "tool_calls"
    assert added(scripted, before) == {}


def test_calls_that_are_cancelled(scripted: Native, stage: Stage, slow: Slow) -> None:
    before = counts(scripted)
    stage.then("</think>", call("slow", a=1))
    read_until(scripted, "tool_use", server_tools=["slow"])
    wait_until(lambda: added(scripted, before) == {("pure", "cancelled"): 1}, "the call is counted")


def no_skill(name: str) -> Skill:
    raise AssertionError(name)


def test_a_call_that_runs_out_of_time() -> None:
    seen: list[Any] = []
    said: list[NativeEvent] = []

    async def run() -> None:
        desk = CallDesk(
            frozenset(),
            frozenset({"slow"}),
            Toolbox([Slow()], timeout_s=0.01),
            SkillOffer((), no_skill),
            said.append,
            lambda kind, end, seconds: seen.append((kind, end, seconds is not None)),
        )
        (message,) = await desk.run([ClientCall("1", "slow", '{"a": 1, "b": 2}')])
        assert "stopped after 0.01 seconds" in message.content

    asyncio.run(run())
    assert seen == [("pure", "timeout", True)]
    assert len(said) == 2
