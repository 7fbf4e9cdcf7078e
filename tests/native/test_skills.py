"""Skills and agents in an exchange."""

from __future__ import annotations

from typing import Any

import pytest

from servers.scripted import Stage

from .api import ADD, Native
from .test_rounds import call


class TestPinned:
    def test_it_is_active_and_rides_the_system_turn(self, scripted: Native, stage: Stage) -> None:
        stage.say("</think>", "\n\n", "Hi.")
        plain = scripted.stream()
        stream = scripted.stream(skill="unit-price")
        assert stream.all("skill") == [{"name": "unit-price", "status": "active", "context": "system"}]
        assert stream.names[:2] == ["status", "skill"]
        assert stream.done["prompt_tokens"] > plain.done["prompt_tokens"] + 100
        whole = scripted.ask(skill="unit-price")
        assert whole["skill_events"] == stream.all("skill")

    def test_answers_reach_the_prompt(self, scripted: Native, stage: Stage) -> None:
        stage.say("</think>", "\n\n", "Hi.")
        tokens = [
            scripted.ask(skill="unit-price", skill_inputs=inputs)["result"]["prompt_tokens"]
            for inputs in ({}, {"currency": "a very long name of a currency"})
        ]
        assert tokens[0] < tokens[1]

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("fields", "status", "named"),
        [
            ({"skill": "nothing"}, 404, "skill"),
            ({"skill": "../../etc/passwd"}, 404, "skill"),
            ({"skill": "unit-price", "skill_inputs": {"colour": "red"}}, 400, "skill_inputs.colour"),
            ({"skill": "unit-price", "skill_inputs": {"currency": {}}}, 400, "skill_inputs.currency"),
            ({"skill_inputs": {"currency": "EUR"}}, 400, "skill_inputs"),
            ({"skills": ["unit-price", "nothing"]}, 404, "skills[1]"),
        ],
    )
    def test_what_is_refused(
        self, scripted: Native, fields: dict[str, Any], status: int, named: str, stream: bool
    ) -> None:
        assert named in scripted.refuse(status=status, stream=stream, **fields)["error"]


class TestOffered:
    def test_the_model_activates_one_and_reads_from_it(self, scripted: Native, stage: Stage) -> None:
        stage.then("</think>", call("activate_skill", name="unit-price"))
        read = call("read_skill_resource", name="unit-price", path="references/units.md")
        stage.then("</think>", read)
        stage.then("</think>", "\n\n", "1.40 EUR")
        stream = scripted.stream(skills=["unit-price"])
        assert stream.all("skill") == [
            {"name": "unit-price", "status": "activated", "context": "call"},
            {"name": "unit-price", "status": "resource", "resource": "references/units.md"},
        ]
        assert "tool_use" not in stream.names
        assert stream.done["rounds"] == 3
        results = [m["content"] for m in stream.done["messages"] if m["role"] == "tool"]
        assert "To compare packs" in results[0]
        assert stream.done["text"] == "1.40 EUR"

    def test_what_is_not_offered_is_missing(self, scripted: Native, stage: Stage) -> None:
        stage.then("</think>", call("activate_skill", name="root"))
        stage.then("</think>", "\n\n", "Well.")
        stream = scripted.stream(skills=["unit-price"])
        assert stream.all("skill") == [{"name": "root", "status": "missing"}]

    def test_paths_do_not_leave_the_skill(self, scripted: Native, stage: Stage) -> None:
        path = "../../../../../../etc/passwd"
        stage.then("</think>", call("read_skill_resource", name="unit-price", path=path))
        stage.then("</think>", "\n\n", "Well.")
        done = scripted.stream(skills=["unit-price"]).done
        assert "root:" not in done["messages"][1]["content"]

    def test_with_server_and_client_tools(self, scripted: Native, stage: Stage) -> None:
        stage.then("</think>", call("activate_skill", name="unit-price"), "\n", call("add", a=1, b=1))
        stage.then("</think>", call("mine"))
        stream = scripted.stream(skills=["unit-price"], server_tools=["add"], tools=[{"name": "mine"}])
        assert [e["status"] for e in stream.all("skill")] == ["activated"]
        assert [e["status"] for e in stream.all("tool_use")] == ["running", "done"]
        assert stream.done["reason"] == "tool_calls"

    def test_it_takes_tool_names_of_its_own(self, scripted: Native) -> None:
        clash = {**ADD, "name": "activate_skill"}
        error = scripted.refuse(skills=["unit-price"], tools=[clash])
        assert "tools" in error["error"] and "activate_skill" in error["error"]

    def test_several_alternatives_do_not_go_with_it(self, scripted: Native) -> None:
        assert "`n`" in scripted.refuse(skills=["unit-price"], n=2)["error"]


class TestAgents:
    """`shopper` pins a skill, names two tools, and limits tokens to 512 and thinking to 256."""

    def test_its_fields_are_defaults(self, scripted: Native, stage: Stage) -> None:
        stage.say("</think>", "\n\n", "Hi.")
        stream = scripted.stream(agent="shopper")
        assert [e["name"] for e in stream.all("skill")] == ["unit-price"]
        assert stream.done["thinking_budget"]["max_tokens"] == 256

    def test_what_the_request_states_wins(self, scripted: Native, stage: Stage) -> None:
        stage.say("</think>", "\n\n", "Hi.")
        answer = scripted.ask(agent="shopper", thinking_budget_tokens=9, server_tools=[])
        assert answer["result"]["thinking_budget"]["max_tokens"] == 9
        assert "tool_events" not in answer
        # A null states nothing, but for budgets.
        answer = scripted.ask(agent="shopper", skill=None, thinking_budget_tokens=None)
        assert answer["skill_events"][0]["name"] == "unit-price"
        assert answer["result"]["thinking_budget"]["tokens_source"] == "request_unlimited"

    def test_its_tools_exclude_alternatives(self, scripted: Native, stage: Stage) -> None:
        assert "`n`" in scripted.refuse(agent="shopper", n=2)["error"]
        stage.say("</think>", "\n\n", "Hi.")
        assert len(scripted.ask(agent="shopper", n=2, server_tools=[])["result"]["choices"]) == 2

    @pytest.mark.parametrize("name", ["nobody", "../shopper", "a" * 200])
    def test_an_unknown_one(self, scripted: Native, name: str) -> None:
        error = scripted.refuse(status=404, agent=name)
        assert error["code"] == "agent_not_found"
        assert "agent" in error["error"]
