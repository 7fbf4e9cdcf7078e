"""Agents: strict files, live, and defaults that any stated field overrides."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.core.errors import AgentInvalid, AgentNotFound, ConfigError
from kiln.skills.agent import MAX_FILE_BYTES, Agent, AgentSampling, adopt, parse
from kiln.skills.agents import AgentLibrary
from kiln.skills.files import Faulty
from kiln.wire.lmkit import NativeChatRequest

from .folders import EXAMPLES

WHOLE = """
description = "Helps."
system = "Be brief."
model = "small"
skill = "unit-price"
skill_inputs = { currency = "USD", packs = 3, exact = true }
skills = ["a", "b"]
server_tools = ["calc_*"]
reasoning = "low"
thinking_budget_tokens = 64
thinking_budget_ms = "unlimited"
memory = true
memory_store = "team"

[sampling]
temperature = 0
top_p = 0.9
top_k = 40
min_p = 0.05
frequency_penalty = 0.5
presence_penalty = -0.5
repeat_penalty = 1.1
seed = 7
max_tokens = 100
stop = ["END"]
"""


def test_every_key_becomes_a_field_of_the_request() -> None:
    agent = parse("helper", WHOLE)
    assert (agent.name, agent.description) == ("helper", "Helps.")
    assert agent.request_fields() == {
        "system": "Be brief.",
        "model": "small",
        "skill": "unit-price",
        "skill_inputs": {"currency": "USD", "packs": 3, "exact": True},
        "skills": ["a", "b"],
        "server_tools": ["calc_*"],
        "reasoning": "low",
        "thinking_budget_tokens": 64,
        "thinking_budget_ms": None,
        "memory": "helper",
        "memory_store": "team",
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repeat_penalty": 1.1,
        "seed": 7,
        "max_tokens": 100,
        "stop": ["END"],
    }
    # Every key that there is stands in the text above.
    keys = {*Agent.__struct_fields__, *AgentSampling.__struct_fields__} - {"name", "sampling", "description"}
    assert set(agent.request_fields()) == keys


def test_an_agent_that_states_nothing_changes_nothing() -> None:
    assert parse("a", "").request_fields() == {}


@pytest.mark.parametrize(
    ("line", "memory"), [("memory = false", None), ("memory = 'shared-1'", "shared-1"), ("", None)]
)
def test_memory_is_an_intent_or_an_id(line: str, memory: str | None) -> None:
    assert parse("a", line).request_fields().get("memory") == memory


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("\nsytem = 'x'", 2, "`sytem` is no key of an agent"),
        ("[sampling]\ntemprature = 1", 2, "`sampling.temprature` is no key of an agent"),
        ("temperature = 1", 1, "`temperature` is no key of an agent"),
        ("name = 'x'", None, "an agent is named by its file"),
        ("[sampling]\n\ntemperature = -1", 3, "`sampling.temperature`: Expected `float` >= 0.0"),
        ("[sampling]\ntemperature = nan", 2, "`sampling.temperature`"),
        ("[sampling]\ntemperature = inf", 2, "`sampling.temperature`"),
        ("[sampling]\ntop_k = true", 2, "`sampling.top_k`"),
        ("[sampling]\ntop_k = 1.5", 2, "`sampling.top_k`"),
        ("[sampling]\nseed = -1", 2, "`sampling.seed`"),
        ("[sampling]\nstop = 'x'", 2, "`sampling.stop`"),
        ("sampling = 1", 1, "`sampling`"),
        ("skills = 'a'", 1, "`skills`"),
        ("skills = [1]", 1, "`skills[0]`"),
        ("system = ''", 1, "`system`"),
        ("model = 1979-05-27", 1, "`model`"),
        ("reasoning = 'max'", 1, "`reasoning`: must be none, low, medium, high"),
        ("thinking_budget_tokens = -1", 1, "`thinking_budget_tokens`"),
        ("thinking_budget_ms = 'none'", 1, '`thinking_budget_ms`: must be a whole number or "unlimited"'),
        ("memory = 'a b'", 1, "`memory`"),
        ("memory = 1", 1, "`memory`"),
        ("memory_store = '../x'", 1, "`memory_store`"),
        ("skill = 'a'\nskill_inputs = { a = [1] }", None, "`skill_inputs"),
        ("skill_inputs = { a = 1 }", None, "the agent pins no `skill`"),
        ("x = ", 1, "not valid TOML"),
        ("a = 1\na = 2", 2, "not valid TOML"),
        ("a = " + "[" * 5000, None, "nested too deeply"),
    ],
)
def test_what_is_wrong_is_named(text: str, line: int | None, expected: str) -> None:
    with pytest.raises(Faulty) as caught:
        parse("a", text)
    (fault,) = caught.value.faults
    assert expected in fault.message
    assert fault.line == line


@given(
    st.text(max_size=100)
    | st.lists(st.sampled_from([*"[]{}=.'\"#\n ", "system", "sampling", "1"])).map("".join)
)
def test_any_text_is_an_agent_or_a_fault(text: str) -> None:
    try:
        parse("a", text)
    except Faulty as error:
        assert error.faults


def test_any_field_that_the_request_states_wins() -> None:
    agent = parse("helper", WHOLE)
    stated: dict[str, object] = {
        "temperature": 1.0,
        "thinking_budget_tokens": None,
        "skills": [],
        "stop": [],
        "system": "",
    }
    adopted = adopt(agent, stated)
    assert {name: adopted[name] for name in stated} == stated
    assert adopted["top_k"] == 40
    assert adopted["skill_inputs"] == {"currency": "USD", "packs": 3, "exact": True}
    assert adopt(agent, {}) == agent.request_fields()


def test_what_an_agent_states_is_a_request_that_is_accepted() -> None:
    fields = parse("helper", WHOLE.replace("temperature = 0", "temperature = 0.5")).request_fields()
    body = {**fields, "messages": [{"role": "user", "content": "x"}]}
    request = msgspec.json.decode(msgspec.json.encode(body), type=NativeChatRequest)
    assert {name: getattr(request, name) for name in fields} == fields


def test_an_agents_answers_stay_with_its_own_skill() -> None:
    agent = parse("helper", WHOLE)
    assert "skill_inputs" not in adopt(agent, {"skill": "other"})
    assert "skill_inputs" not in adopt(agent, {"skill": None})
    assert "skill_inputs" in adopt(agent, {"skill": "unit-price"})
    # Answers are one field: what the request states replaces them all.
    assert adopt(agent, {"skill_inputs": {"packs": 1}})["skill_inputs"] == {"packs": 1}


@pytest.fixture
def library(tmp_path: Path) -> AgentLibrary:
    (tmp_path / "good.toml").write_text("system = 'x'")
    return AgentLibrary(tmp_path)


def test_an_invalid_agent_does_not_stop_the_others(library: AgentLibrary, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("colour = 'red'")
    (tmp_path / "b d.toml").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / ".hidden.toml").touch()
    (tmp_path / "folder.toml").mkdir()
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "huge.toml").write_text("#" * (MAX_FILE_BYTES + 1))
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    entries = {entry.name: entry for entry in library.list()}
    assert list(entries) == ["b d", "bad", "bytes", "folder", "good", "huge", "pipe"]
    assert [name for name, entry in entries.items() if entry.agent] == ["good"]
    assert library.get("good").system == "x"
    for name in ("bad", "bytes", "folder", "huge", "pipe"):
        with pytest.raises(AgentInvalid) as caught:
            library.get(name)
        assert (caught.value.status, caught.value.param) == (409, "agent")
        assert str(tmp_path) not in caught.value.message


@pytest.mark.parametrize(
    "name", ["nothing", "", "..", "../good", "good.toml", "good\0", "x" * 5000, "\ud800"]
)
def test_an_unknown_name_is_a_named_refusal(library: AgentLibrary, name: str) -> None:
    with pytest.raises(AgentNotFound) as caught:
        library.get(name)
    assert (caught.value.status, caught.value.param) == (404, "agent")


def test_an_edit_counts_from_the_next_use_on(library: AgentLibrary, tmp_path: Path) -> None:
    path = tmp_path / "good.toml"
    assert library.get("good").system == "x"
    path.write_text("system = 'y'")
    assert library.get("good").system == "y"
    path.write_text("system = ")
    with pytest.raises(AgentInvalid, match="not valid TOML"):
        library.get("good")
    path.unlink()
    with pytest.raises(AgentNotFound):
        library.get("good")
    # As mounted configurations are: a link to a file in another folder.
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "real").write_text("system = 'z'")
    path.symlink_to("data/real")
    agent = library.get("good")
    assert (agent.name, agent.system) == ("good", "z")


def test_without_a_folder_there_are_no_agents(tmp_path: Path) -> None:
    assert AgentLibrary().list() == ()
    with pytest.raises(AgentNotFound):
        AgentLibrary().get("good")
    with pytest.raises(ConfigError, match="agents.dir"):
        AgentLibrary(tmp_path / "not-there")


def test_the_bundled_example_is_valid() -> None:
    entries = AgentLibrary(EXAMPLES / "agents").list()
    assert entries
    assert [entry.faults for entry in entries if entry.faults] == []
