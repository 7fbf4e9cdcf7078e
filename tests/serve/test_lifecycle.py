"""Requests that are left, too many, too slow, cut short; and servers that stop or break."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from kiln.core.errors import EngineFailed
from servers import traffic
from servers.process import Served, served_by_process
from servers.raw import connected, posted
from servers.scripted import Stage, staging
from servers.server import Server, Streamed, chat_body, serving_model, wait_until

SKIP = "/lmkit/v1/chat/skip-thinking"


class TestDisconnects:
    """The scripted model would talk for 20 seconds; whoever is gone must not keep it talking."""

    @pytest.fixture(autouse=True)
    def script(self, stage: Stage) -> None:
        stage.repeat("word ")
        stage.pace_s = 0.005

    @pytest.mark.parametrize("stream", [True, False])
    @pytest.mark.parametrize("n", [1, 3])
    def test_the_sequence_is_freed(self, scripted_server: Server, stream: bool, n: int) -> None:
        if stream and n > 1:
            n = 1
        before = scripted_server.outcomes()["unresolved"]
        body = chat_body(stream=stream, n=n, max_tokens=4000, thinking_budget_tokens=3900)
        with posted(scripted_server.url, traffic.CHAT, body) as raw:
            running = lambda: scripted_server.metric("kiln_engine_running") == n  # noqa: E731
            wait_until(running, "the request runs")
            if stream:
                assert raw.recv(200).startswith(b"HTTP/1.1 200")
        wait_until(scripted_server.is_idle, "the engine is idle", within_s=10)
        counted = lambda: scripted_server.outcomes()["unresolved"] == before + n  # noqa: E731
        wait_until(counted, "the cut is counted", within_s=10)

    def test_so_is_one_that_waits(self, scripted_server: Server) -> None:
        body = chat_body(stream=True, max_tokens=4000)
        with posted(scripted_server.url, traffic.CHAT, body), posted(scripted_server.url, traffic.CHAT, body):
            runs = lambda: scripted_server.metric("kiln_engine_running") == 2  # noqa: E731
            wait_until(runs, "both run")
        wait_until(scripted_server.is_idle, "the engine is idle", within_s=10)

    def test_before_the_prompt_is_computed(self, scripted_server: Server, stage: Stage) -> None:
        stage.pace_s = 0.0
        go_on = threading.Event()

        def wait() -> int:
            assert go_on.wait(60)
            return stage.end

        stage.say([wait])
        try:
            with posted(scripted_server.url, traffic.CHAT, chat_body(stream=True)):
                time.sleep(0.1)
            with posted(scripted_server.url, traffic.CHAT, chat_body(stream=False)):
                time.sleep(0.1)
        finally:
            go_on.set()
        scripted_server.wait_idle()

    def test_in_the_middle_of_the_body(self, scripted_server: Server) -> None:
        with connected(scripted_server.url) as raw:
            raw.sendall(
                f"POST {traffic.CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                'content-length: 1000\r\n\r\n{"messages":['.encode()
            )
        assert scripted_server.client.get("/health").status_code == 200

    def test_a_reset_connection(self, scripted_server: Server) -> None:
        with posted(scripted_server.url, traffic.CHAT, chat_body(stream=True, max_tokens=4000)) as raw:
            raw.recv(200)
            # Closing now sends a reset instead of an orderly end.
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        wait_until(scripted_server.is_idle, "the engine is idle", within_s=10)

    def test_half_a_request_behind_another(self, scripted_server: Server) -> None:
        """A client may send its next request early; that is no sign that it has gone."""
        body = chat_body(max_tokens=20)
        with posted(scripted_server.url, traffic.CHAT, body) as raw:
            raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            received = b""
            while b'{"status":"ok"}' not in received:
                part = raw.recv(65536)
                assert part, received
                received += part
        assert received.startswith(b"HTTP/1.1 200")
        assert b'"completion_tokens":20' in received


def test_disconnects_from_the_real_model(server: Server) -> None:
    for stream in (True, False):
        with posted(server.url, traffic.CHAT, chat_body(stream=stream, max_tokens=4000, ignore_eos=True)):
            wait_until(lambda: server.metric("kiln_engine_running") == 1, "the request runs")
        wait_until(server.is_idle, "the engine is idle", within_s=10)
    assert server.metric("kiln_kv_cells_used") < 4000
    assert server.ask()["choices"][0]["finish_reason"] == "stop"


class TestQueue:
    async def test_more_requests_than_may_wait(self, narrow_server: Server) -> None:
        async with traffic.async_client(narrow_server.url) as client:
            body = chat_body(max_tokens=24, ignore_eos=True)
            posts = (client.post(traffic.CHAT, json={**body, "stream": i % 2 == 0}) for i in range(300))
            responses = await asyncio.gather(*posts)
        assert len(responses) == 300
        refused = [r for r in responses if r.status_code == 429]
        served = [r for r in responses if r.status_code == 200]
        assert len(refused) + len(served) == 300
        assert refused
        assert len(served) >= 10
        for response in refused:
            assert response.headers["retry-after"].isdigit()
            error = response.json()["error"]
            assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
        for response in served:
            if response.headers["content-type"].startswith("text/event-stream"):
                assert Streamed.parse(response.content).finish_reason == "length"
            else:
                assert response.json()["usage"]["completion_tokens"] == 24
        await asyncio.to_thread(narrow_server.wait_idle)

    async def test_as_many_as_may_wait(self, narrow_server: Server) -> None:
        async with traffic.async_client(narrow_server.url) as client:
            posts = (client.post(traffic.CHAT, json=chat_body(max_tokens=8)) for _ in range(8))
            responses = await asyncio.gather(*posts)
        assert [r.status_code for r in responses] == [200] * 8

    def test_choices_are_counted_one_by_one(self, narrow_server: Server) -> None:
        assert narrow_server.post(n=8, max_tokens=4).status_code == 200
        with posted(narrow_server.url, traffic.CHAT, chat_body(max_tokens=4000, ignore_eos=True)):
            wait_until(lambda: narrow_server.metric("kiln_engine_running") == 1, "the request runs")
            assert narrow_server.post(n=9, max_tokens=4).status_code == 200
            response = narrow_server.post(n=10, max_tokens=4)
        assert response.status_code == 429
        assert response.headers["retry-after"]
        narrow_server.wait_idle()

    async def test_every_kind_finishes(self, server: Server) -> None:
        """120 requests for 16 places: nobody is forgotten."""
        async with traffic.async_client(server.url) as client:
            posts = (
                client.post(
                    traffic.CHAT,
                    json=chat_body(temperature=1, max_tokens=1 + i % 40, stream=i % 3 == 0, seed=i),
                )
                for i in range(120)
            )
            responses = await asyncio.gather(*posts)
        assert all(r.status_code == 200 for r in responses)


def test_a_slow_reader_harms_only_itself(scripted_server: Server, stage: Stage) -> None:
    stage.repeat("word ")
    body = chat_body(stream=True, max_tokens=3000)
    with posted(scripted_server.url, traffic.CHAT, body, receive_buffer=4096) as raw:
        assert raw.recv(1000).startswith(b"HTTP/1.1 200")
        # Others are served meanwhile, and the engine does not wait for the reader.
        assert scripted_server.ask(max_tokens=30)["usage"]["completion_tokens"] == 30
        scripted_server.wait_idle()
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            part = raw.recv(2048)
            assert part
            received += part
    assert received.count(b'"reasoning_content"') >= 2990
    assert b"data: [DONE]\n\n" in received


class TestSkipping:
    @pytest.fixture(autouse=True)
    def script(self, stage: Stage) -> None:
        stage.repeat("1")
        stage.pace_s = 0.005

    def skip(self, server: Server, **body: Any) -> httpx.Response:
        return server.client.post(SKIP, json=body)

    @pytest.mark.parametrize("budget", [{}, {"thinking_budget_tokens": 3000}])
    def test_the_answer_follows(self, scripted_server: Server, stage: Stage, budget: dict[str, int]) -> None:
        before = scripted_server.outcomes()["interrupted"]
        raw = b""
        skipped = False
        body = chat_body(stream=True, max_tokens=3500, **budget)
        with scripted_server.client.stream("POST", traffic.CHAT, json=body) as response:
            for part in response.iter_raw():
                raw += part
                if not skipped and raw.count(b"reasoning_content") > 3:
                    skipped = True
                    request_id = Streamed.parse(raw[: raw.rfind(b"\n\n") + 2]).chunks[0]["id"]
                    accepted = self.skip(scripted_server, request_id=request_id)
                    assert accepted.status_code == 202
                if b'"content":' in raw:
                    stage.loop = []  # the answer has begun; let it end
        streamed = Streamed.parse(raw)
        assert streamed.done
        assert streamed.reasoning.startswith("1111")
        assert streamed.content.startswith("1")
        assert streamed.finish_reason == "stop"
        record = streamed.record
        assert record["triggered"] is False
        if budget:
            assert record["closed"] is True
            assert "trigger" not in record
            assert record["thinking_tokens"] >= 4
        else:
            assert "closed" not in record
        assert scripted_server.outcomes()["interrupted"] == before + 1
        # It is gone now.
        gone = self.skip(scripted_server, request_id=request_id)
        assert gone.status_code == 404
        assert gone.json()["code"] == "exchange_not_found"

    def test_once_the_answer_began_it_does_nothing(self, scripted_server: Server, stage: Stage) -> None:
        stage.say("a", "</think>", "\n\n")
        stage.repeat("1")
        raw, request_id = b"", ""
        body = chat_body(stream=True, max_tokens=100, thinking_budget_tokens=5)
        with scripted_server.client.stream("POST", traffic.CHAT, json=body) as response:
            for part in response.iter_raw():
                raw += part
                if not request_id and raw.count(b'"content":') > 2:
                    request_id = Streamed.parse(raw[: raw.rfind(b"\n\n") + 2]).chunks[0]["id"]
                    assert self.skip(scripted_server, request_id=request_id).status_code == 202
        streamed = Streamed.parse(raw)
        assert streamed.reasoning == "a"
        assert streamed.content == "1" * 97
        assert streamed.record["closed"] is True
        assert streamed.record["thinking_tokens"] == 1

    def test_wrong_requests(self, scripted_server: Server) -> None:
        assert self.skip(scripted_server, request_id="chatcmpl-unknown").status_code == 404
        assert self.skip(scripted_server).status_code == 400
        assert self.skip(scripted_server, request_id=None).status_code == 400
        assert scripted_server.client.get(SKIP).status_code == 405


def test_skipping_on_the_real_model(server: Server) -> None:
    before = server.outcomes()["interrupted"]
    raw, request_id = b"", ""
    body = chat_body("Think forever.", stream=True, max_tokens=2000, thinking_budget_tokens=1900)
    with server.client.stream("POST", traffic.CHAT, json=body) as response:
        for part in response.iter_raw():
            raw += part
            if not request_id and raw.count(b"reasoning_content") > 2:
                request_id = Streamed.parse(raw[: raw.rfind(b"\n\n") + 2]).chunks[0]["id"]
                assert server.client.post(SKIP, json={"request_id": request_id}).status_code == 202
    streamed = Streamed.parse(raw)
    assert streamed.record["closed"] is True
    assert streamed.record["triggered"] is False
    assert server.outcomes()["interrupted"] == before + 1


def crash() -> int:
    raise RuntimeError("a scripted crash")


def fail() -> int:
    raise EngineFailed("a scripted failure")


class TestFailures:
    def test_a_failed_step_fails_its_requests_only(self, scripted_server: Server, stage: Stage) -> None:
        stage.say("a", [fail])
        response = scripted_server.post()
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_failed"
        assert response.headers["retry-after"] == "1"
        native = scripted_server.client.post("/lmkit/v1/chat", json={"messages": chat_body()["messages"]})
        assert (native.status_code, native.headers["retry-after"]) == (503, "1")
        streamed = scripted_server.stream()
        assert streamed.error is not None
        assert streamed.error["code"] == "engine_failed"
        assert not streamed.done
        stage.say([fail])
        assert scripted_server.post(stream=True).status_code == 503
        stage.say("a", "</think>", "b")
        assert scripted_server.ask()["choices"][0]["message"]["content"] == "b"
        assert scripted_server.client.get("/health").status_code == 200

    @pytest.mark.parametrize("stream", [True, False])
    def test_a_crash_leaves_nobody_waiting(self, stream: bool) -> None:
        with staging() as staged:
            server = staged.server
            staged.stage.say("a", "b", [crash])

            async def ask_many() -> list[httpx.Response]:
                async with traffic.async_client(server.url) as client:
                    posts = (client.post(traffic.CHAT, json=chat_body(stream=stream)) for _ in range(20))
                    return await asyncio.gather(*posts)

            for response in asyncio.run(ask_many()):
                if response.status_code == 200:
                    streamed = Streamed.parse(response.content)
                    assert stream
                    assert streamed.error is not None
                    assert streamed.error["code"] == "engine_failed"
                    assert not streamed.done
                else:
                    assert response.status_code == 503
                    assert response.json()["error"]["code"] == "engine_failed"
            health = server.client.get("/health")
            assert (health.status_code, health.json()) == (503, {"status": "engine_failed"})
            assert server.post().status_code == 503
            assert server.client.get("/metrics").status_code == 200

    def test_a_request_that_runs_too_long(self) -> None:
        with staging(engine__request_timeout_s=0.3) as staged:
            server, stage = staged.server, staged.stage
            stage.repeat("a")
            stage.pace_s = 0.01
            response = server.post(max_tokens=4000)
            assert response.status_code == 504
            assert response.json()["error"]["code"] == "request_timed_out"
            streamed = server.stream(max_tokens=4000)
            assert streamed.error is not None
            assert streamed.error["code"] == "request_timed_out"
            server.wait_idle()

    def test_a_stall_is_waited_out(self, scripted_server: Server, stage: Stage) -> None:
        go_on = threading.Event()

        def stall() -> int:
            assert go_on.wait(60)
            return stage.token("b")

        stage.say("a", "</think>", [stall])
        timer = threading.Timer(0.5, go_on.set)
        timer.start()
        assert scripted_server.ask()["choices"][0]["message"]["content"] == "b"
        timer.join()


@pytest.fixture
def kiln_serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    with ExitStack() as running:
        yield lambda **settings: running.enter_context(served_by_process(tmp_path, **settings))


class LongStream:
    """A request that takes seconds, read on a thread."""

    def __init__(self, url: str, **fields: Any) -> None:
        self._url = url
        self._body = chat_body(**{"ignore_eos": True, "stream": True, **fields})
        self.raw = b""
        self.status = 0
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        if self._body["stream"]:
            assert self._begun.wait(60)

    def _read(self) -> None:
        with traffic.client(self._url) as client:
            with client.stream("POST", traffic.CHAT, json=self._body) as answer:
                self.status = answer.status_code
                for part in answer.iter_raw():
                    self.raw += part
                    self._begun.set()

    def finish(self) -> Streamed:
        self._thread.join(90)
        assert not self._thread.is_alive()
        return Streamed.parse(self.raw)


class TestShutdown:
    def test_a_running_request_finishes(self, kiln_serve: Callable[..., Served]) -> None:
        served = kiln_serve(server__shutdown_grace_s=60)
        long = LongStream(served.url, max_tokens=600)
        served.send(signal.SIGTERM)
        streamed = long.finish()
        assert streamed.done
        assert streamed.finish_reason == "length"
        assert len(streamed.texts("reasoning_content")) + len(streamed.texts("content")) > 200
        assert served.wait() == 0
        assert "Traceback" not in served.log()

    def test_beyond_the_grace_it_is_cut(self, kiln_serve: Callable[..., Served]) -> None:
        served = kiln_serve(server__shutdown_grace_s=0.2)
        streams = [LongStream(served.url, max_tokens=4000) for _ in range(3)]
        whole = LongStream(served.url, max_tokens=4000, stream=False)
        with traffic.client(served.url) as client:
            wait_until(lambda: "kiln_engine_running 4" in client.get("/metrics").text, "all run")
        served.send(signal.SIGTERM)
        for stream in streams:
            streamed = stream.finish()
            assert streamed.error is not None
            assert streamed.error["code"] == "shutting_down"
            assert not streamed.done
        whole.finish()
        assert whole.status == 503
        assert json.loads(whole.raw)["error"]["code"] == "shutting_down"
        assert served.wait() == 0
        assert "Traceback" not in served.log()

    def test_while_draining_nothing_new_begins(self, kiln_serve: Callable[..., Served]) -> None:
        served = kiln_serve(server__shutdown_grace_s=60)
        with httpx.Client(base_url=served.url, timeout=30) as client:
            assert client.get("/health").status_code == 200
            long = LongStream(served.url, max_tokens=500)
            served.send(signal.SIGTERM)
            time.sleep(0.2)
            try:
                response = client.post(traffic.CHAT, json=chat_body(max_tokens=1))
            except httpx.TransportError:
                pass  # the listener is closed already
            else:
                assert response.status_code == 503
                assert response.json()["error"]["code"] == "shutting_down"
        assert long.finish().done
        assert served.wait() == 0

    def test_an_idle_server_stops_at_once(self, kiln_serve: Callable[..., Served]) -> None:
        served = kiln_serve(server__shutdown_grace_s=60)
        with httpx.Client(base_url=served.url) as client:
            # An open connection without a request does not hold it up.
            assert client.get("/health").json() == {"status": "ok"}
            served.send(signal.SIGTERM)
            assert served.wait(20) == 0

    def test_a_second_interrupt_does_not_wait(self, kiln_serve: Callable[..., Served]) -> None:
        served = kiln_serve(server__shutdown_grace_s=600)
        # Together they would take minutes.
        body = chat_body(stream=True, max_tokens=4000, ignore_eos=True)
        with ExitStack() as clients:
            raws = [clients.enter_context(posted(served.url, traffic.CHAT, body)) for _ in range(100)]
            assert raws[0].recv(100)
            served.send(signal.SIGINT)
            time.sleep(0.5)
            assert served.process.poll() is None
            served.send(signal.SIGINT)
            served.wait(20)

    def test_a_port_in_use(self, server: Server, tmp_path: Path) -> None:
        port = str(urlsplit(server.url).port)
        run = subprocess.run(
            [sys.executable, "-m", "kiln", "serve", "--port", port],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
        )
        assert run.returncode != 0
        assert port in run.stderr
        assert "Traceback" not in run.stderr


def test_servers_come_and_go() -> None:
    """Weights and contexts are freed with their server, and several can run side by side."""
    for _ in range(3):
        with serving_model() as one, serving_model(engine__ctx_size=256) as two:
            assert one.ask(max_tokens=5)["usage"] == two.ask(max_tokens=5)["usage"]
