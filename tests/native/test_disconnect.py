"""A client that goes away, in whatever phase, leaves nothing behind."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest

from kiln.chat.models.seat import Lease, LoadProgress, Narrate
from kiln.core.errors import EngineFailed
from kiln.core.settings import CatalogModelSettings
from kiln.tools.toolbox import Toolbox
from servers.raw import posted
from servers.scripted import Stage, staging
from servers.server import FIXTURES, serving_model, settings_of, wait_until

from .api import CHAT, Event, Native, native_body
from .conftest import equip
from .test_rounds import call
from .tools import Slow


def asked(native: Native, **fields: Any) -> AbstractContextManager[socket.socket]:
    """A request that is sent and not answered yet; the end of the context is the end of the connection."""
    return posted(native.server.url, CHAT, native_body(**fields))


def read_until(native: Native, name: str, channel: str | None = None, **fields: Any) -> list[Event]:
    """Read a stream up to an event and go."""
    seen: list[Event] = []
    with native.streaming(**fields) as events:
        for event in events:
            seen.append(event)
            if event[0] == name and (channel is None or event[1]["t"] == channel):
                return seen
    raise AssertionError(f"no {name} among {seen}")


def is_free(native: Native, name: str) -> None:
    """The engine is idle and the exchange's name is not taken."""
    native.server.wait_idle()
    wait_until(lambda: native.skip(name).status_code == 404, "the name is free")


@pytest.mark.parametrize("phase", ["thinking", "text"])
@pytest.mark.parametrize("alternatives", [1, 3])
def test_while_it_is_generated(scripted: Native, stage: Stage, phase: str, alternatives: int) -> None:
    stage.say(*(["</think>", "\n\n"] if phase == "text" else []))
    stage.repeat("1")
    stage.pace_s = 0.005
    read_until(scripted, "delta", phase, request_id="gone", n=alternatives, max_tokens=4000)
    is_free(scripted, "gone")


def test_while_the_prompt_is_read(native: Native) -> None:
    long = [{"role": "user", "content": "1+" * 1800 + "1=?"}]
    seen = read_until(native, "status", request_id="gone", messages=long)
    assert seen == [("status", {"phase": "session"})]
    is_free(native, "gone")


def test_while_the_real_model_thinks_and_answers(native: Native) -> None:
    forever = [{"role": "user", "content": "Think forever."}]
    read_until(native, "delta", "thinking", request_id="gone", messages=forever)
    is_free(native, "gone")
    read_until(native, "delta", "text", request_id="gone", reasoning="none")
    is_free(native, "gone")


class TestInATool:
    @pytest.fixture(autouse=True)
    def script(self, stage: Stage, slow: Slow) -> None:
        slow.begun = slow.cancelled = 0
        stage.then("</think>", call("slow", a=1), "\n", call("slow", a=2))

    def test_of_a_stream(self, scripted: Native, slow: Slow) -> None:
        read_until(scripted, "tool_use", request_id="gone", server_tools=["slow"])
        wait_until(lambda: slow.cancelled == slow.begun and not slow.running, "both calls are cancelled")
        is_free(scripted, "gone")

    def test_its_silence_is_broken(
        self, scripted: Native, slow: Slow, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kiln.native.exchange.SILENCE_S", 0.05)
        with asked(scripted, stream=True, server_tools=["slow"]) as connection:
            received = b""
            while received.count(b"\r\n:\n\n\r\n") < 3:
                received += connection.recv(65536)
        assert b'"status":"running"' in received
        wait_until(lambda: slow.cancelled == 2, "both calls are cancelled")

    def test_of_a_whole_answer(self, scripted: Native, slow: Slow) -> None:
        with asked(scripted, request_id="gone", server_tools=["slow"]):
            wait_until(lambda: slow.running == 2, "both calls run")
            # Between rounds it is as alive as ever.
            assert scripted.skip("gone").status_code == 202
        wait_until(lambda: slow.cancelled == 2, "both calls are cancelled")
        is_free(scripted, "gone")


def test_before_the_first_token_of_a_whole_answer(scripted: Native, stage: Stage) -> None:
    begun, go = threading.Event(), threading.Event()

    def wait() -> int:
        begun.set()
        go.wait(60)
        return stage.end

    stage.say([wait])
    with asked(scripted, request_id="gone"):
        assert begun.wait(60)
    wait_until(lambda: scripted.skip("gone").status_code == 404, "the name is free")
    go.set()
    is_free(scripted, "gone")


class SlowAdd(Slow):
    """The tool that the bundled model calls."""

    name = "add"
    description = "Add two numbers"


@pytest.fixture(scope="module")
def slow_add() -> SlowAdd:
    return SlowAdd()


@pytest.fixture(scope="module")
def catalog(slow_add: SlowAdd) -> Iterator[Native]:
    """The bundled model with a slow tool, and another model to load."""
    other = CatalogModelSettings(path=str(FIXTURES / "multi-close.gguf"))
    with serving_model(replace(settings_of(), models={"other": other})) as server:
        app = server.app
        app.state.kiln = replace(app.state.kiln, toolbox=Toolbox([slow_add]))
        yield Native(server)


def test_while_a_tool_of_the_real_model_runs(catalog: Native, slow_add: SlowAdd) -> None:
    ask = [{"role": "user", "content": "What is 3+4?"}]
    seen = read_until(catalog, "tool_use", request_id="gone", messages=ask, server_tools=["add"])
    assert seen[-1][1]["args"] == {"a": 3, "b": 4}
    wait_until(lambda: slow_add.cancelled == 1 and not slow_add.running, "the call is cancelled")
    is_free(catalog, "gone")


class TestLoading:
    def test_it_is_narrated_and_answers(self, catalog: Native) -> None:
        stream = catalog.stream(model="other", max_tokens=5)
        phases = [status["phase"] for status in stream.all("status")]
        assert phases[0] == "loading"
        assert phases.index("loading") < phases.index("session") < phases.index("prompt")
        loading = [s for s in stream.all("status") if s["phase"] == "loading"]
        assert loading[-1]["pct"] == 100.0
        assert stream.done["model"] == "other"
        # It is there now.
        assert catalog.stream(model="other", max_tokens=5).all("status")[0] == {"phase": "session"}

    def test_a_client_that_goes_meanwhile(self) -> None:
        with serving_model() as server:
            native, waits = Native(server), [0, 0]
            catalog = server.app.state.kiln.catalog

            async def stalled(model: str | None, narrate: Narrate | None = None) -> Lease:
                assert narrate is not None
                narrate(LoadProgress("downloading", 1, 4))
                waits[0] += 1
                try:
                    await asyncio.Event().wait()
                finally:
                    waits[1] += 1
                raise AssertionError("nobody sets the event")

            catalog.lease = stalled
            seen = read_until(native, "status", request_id="gone")
            assert seen == [("status", {"phase": "downloading", "pct": 25.0, "done": 1, "total": 4})]
            wait_until(lambda: waits == [1, 1], "the load is left")
            with asked(native, request_id="gone"):
                wait_until(lambda: waits[0] == 2, "it loads")
                assert native.skip("gone").status_code == 202
            wait_until(lambda: waits == [2, 2], "the load is left")
            is_free(native, "gone")


def test_an_error_after_the_first_event_ends_the_stream(scripted: Native, stage: Stage) -> None:
    def fail() -> int:
        raise EngineFailed("a scripted failure")

    stage.say("1", "1", [fail])
    with scripted.streaming(request_id="failing") as events:
        *_, (name, error) = events
    assert (name, error["code"]) == ("error", "engine_failed")
    assert "a scripted failure" in error["error"]
    is_free(scripted, "failing")
    stage.say([fail])
    assert scripted.refuse(status=503)["code"] == "engine_failed"


def test_a_request_that_takes_too_long() -> None:
    with staging(engine__request_timeout_s=0.5) as staged:
        slow, stage = Slow(), staged.stage
        equip(staged.app, slow)
        native = Native(staged.server)
        stage.then("</think>", call("slow"))
        assert native.refuse(status=504, server_tools=["slow"])["code"] == "request_timed_out"
        assert (slow.cancelled, slow.running) == (1, 0)
        stage.repeat("1")
        stage.pace_s = 0.01
        with native.streaming() as events:
            *_, (name, error) = events
        assert (name, error["code"]) == ("error", "request_timed_out")
        stage.clear()
        staged.server.wait_idle()
