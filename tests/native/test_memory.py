"""Memory in an exchange: recalled as hidden context, learned from afterwards, kept over a restart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from servers.scripted import Stage, staging
from servers.server import serving_model, wait_until

from .api import Native

MEMORY = "/lmkit/v1/memory/home"


@contextmanager
def remembering(path: Path, **values: Any) -> Iterator[tuple[Native, Stage]]:
    with staging(store__path=str(path / "kiln.db"), **values) as staged:
        yield Native(staged.server), staged.stage


def facts(native: Native) -> list[str]:
    return [fact["text"] for fact in native.server.client.get(MEMORY).json()["facts"]]


def found(*texts: str) -> str:
    """What the model answers when it is asked for facts."""
    return json.dumps({"facts": [{"text": text, "replaces": []} for text in texts]})


def test_an_exchange_is_learned_from_and_recalled_after_a_restart(tmp_path: Path) -> None:
    with remembering(tmp_path) as (native, stage):
        stage.then("</think>", "\n\n", "Nice.")
        stage.then(found("The user has 7 apples."))
        first = native.stream("I have 7 apples.", memory="home").done
        wait_until(lambda: facts(native) == ["The user has 7 apples."], "it is learned")
        # Without a memory, and under another one, nothing is known.
        for other in ({}, {"memory": "work"}):
            stage.then("</think>", "\n\n", "Nice.")
            stage.then(found())
            assert (
                native.ask("I have 7 apples.", **other)["result"]["prompt_tokens"] == first["prompt_tokens"]
            )
    with remembering(tmp_path) as (native, stage):
        stage.then("</think>", "\n\n", "Seven.")
        again = native.ask("I have 7 apples.", memory="home")["result"]
        # It is there, and nothing of it is shown.
        assert again["prompt_tokens"] > first["prompt_tokens"] + 10
        assert "apples" not in again["text"]
        assert "messages" not in again


def test_what_is_not_learned_from(tmp_path: Path) -> None:
    with remembering(tmp_path) as (native, stage):
        # A call for the client is no answer yet, and one that was cut is none.
        stage.then("</think>", '<tool_call>{"name": "f", "arguments": {}}</tool_call>')
        assert native.ask(memory="home", tools=[{"name": "f"}])["result"]["reason"] == "tool_calls"
        stage.then("</think>", "1", "2", "3")
        assert native.ask(memory="home", max_tokens=3)["result"]["reason"] == "length"
        stage.repeat("1")
        stage.pace_s = 0.01
        with native.streaming(memory="home", max_tokens=3000) as events:
            next(events)
        native.server.wait_idle()
        stage.clear()
        # The next completion is the next answer, not a question for facts.
        stage.then("</think>", "\n\n", "Yes.")
        stage.then(found("The user said yes."))
        assert native.ask(memory="home")["result"]["text"] == "Yes."
        wait_until(lambda: facts(native) == ["The user said yes."], "it is learned")


def test_switched_off_the_exchange_goes_on_without(tmp_path: Path) -> None:
    with remembering(tmp_path, store__memory=False) as (native, stage):
        stage.then("</think>", "\n\n", "Well.")
        assert native.ask(memory="home", memory_store="any")["result"]["text"] == "Well."
        assert native.ask(max_tokens=0)["result"]["rounds"] == 1


def test_an_unknown_store(tmp_path: Path) -> None:
    with remembering(tmp_path) as (native, _):
        for stream in (False, True):
            error = native.refuse(status=404, memory="home", memory_store="nowhere", stream=stream)
            assert error["code"] == "memory_store_not_found"


def test_facts_reach_the_real_model(tmp_path: Path) -> None:
    with serving_model(store__path=str(tmp_path / "kiln.db")) as server:
        native = Native(server)
        text = "The user likes tea more than coffee."
        assert server.client.post(MEMORY, json={"text": text}).status_code in (200, 201)
        tokens = [native.ask(**fields)["result"]["prompt_tokens"] for fields in ({}, {"memory": "home"})]
        assert tokens[1] > tokens[0] + 20
