"""The engine's own process dies, and the server lives on: real processes, real signals."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from servers.process import served_by_process
from servers.server import wait_until

from .servers import DEADLINE_S, Server, engine_pids, serving, wait_for_metric


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as started:
        yield started


def ask(url: str, **fields: object) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "Think forever."}], **fields}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=DEADLINE_S)


def stream(url: str) -> str:
    """The body of a long stream, however it ends."""
    body = {
        "messages": [{"role": "user", "content": "Think forever."}],
        "max_tokens": 3000,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=DEADLINE_S) as response:
        return response.read().decode()


def test_the_server_says_how_it_runs(server: Server) -> None:
    facts = httpx.get(f"{server.url}/v1/config").json()["resolved"]["engine"]
    assert facts["isolation"] == "process"
    assert facts["exactness"]["proven"] is True


def test_a_killed_engine_ends_running_requests_and_serves_the_next(server: Server) -> None:
    url = server.url
    for _ in range(3):
        pid = server.engine()
        with ThreadPoolExecutor(12) as pool:
            streams = [pool.submit(stream, url) for _ in range(4)]
            plain = [pool.submit(ask, url, max_tokens=3000, ignore_eos=True) for _ in range(4)]
            wait_for_metric(url, "kiln_engine_running 8.0")
            os.kill(pid, signal.SIGKILL)
            for answer in plain:
                response = answer.result()
                assert response.status_code == 503
                assert response.json()["error"]["code"] == "engine_failed"
            for text in (s.result() for s in streams):
                assert '"code":"engine_failed"' in text
                assert "[DONE]" not in text
        # The next request may come before the successor is ready: it waits.
        assert ask(url, max_tokens=8).status_code == 200
        assert server.engine(other_than=pid) != pid
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}


def test_waiting_requests_survive_a_killed_engine() -> None:
    with serving(parallel=1) as server, ThreadPoolExecutor(6) as pool:
        running = pool.submit(ask, server.url, max_tokens=3000, ignore_eos=True)
        wait_for_metric(server.url, "kiln_engine_running 1.0")
        waiting = [pool.submit(ask, server.url, max_tokens=4) for _ in range(4)]
        wait_for_metric(server.url, "kiln_engine_waiting 4.0")
        os.kill(server.engine(), signal.SIGKILL)
        assert running.result().status_code == 503
        assert [answer.result().status_code for answer in waiting] == [200] * 4


def test_a_server_that_stops_while_its_engine_restarts() -> None:
    with serving() as server:
        os.kill(server.engine(), signal.SIGKILL)
    assert not engine_pids(server.parent) - server.others


def health(url: str) -> tuple[int, str]:
    response = httpx.get(f"{url}/health")
    return response.status_code, response.json()["status"]


def test_a_hung_engine_is_replaced() -> None:
    with serving(parallel=2, hang_timeout_s=2.0) as server, ThreadPoolExecutor(6) as pool:
        streamed = pool.submit(stream, server.url)
        plain = pool.submit(ask, server.url, max_tokens=3000, ignore_eos=True)
        wait_for_metric(server.url, "kiln_engine_running 2.0")
        waiting = pool.submit(ask, server.url, max_tokens=4)
        wait_for_metric(server.url, "kiln_engine_waiting 1.0")
        pid = server.engine()
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: health(server.url) == (503, "engine_restarting"), "the hang is noticed")
        assert "the engine process hung" in streamed.result()
        assert plain.result().status_code == 503
        assert "the engine process hung" in plain.result().json()["error"]["message"]
        assert waiting.result().status_code == 200
        assert health(server.url) == (200, "ok")
        assert server.engine(other_than=pid) != pid
        assert "kiln_engine_restarts_total 1.0" in httpx.get(f"{server.url}/metrics").text


def test_an_engine_that_hangs_while_it_is_idle_is_replaced_once_it_is_needed() -> None:
    with serving(hang_timeout_s=1.0) as server:
        pid = server.engine()
        assert ask(server.url, max_tokens=4).status_code == 200
        os.kill(pid, signal.SIGSTOP)
        # Idle engines owe nothing: for longer than the limit nothing happens.
        time.sleep(2.5)
        assert server.engine() == pid
        # It had not begun, so the next engine gets it.
        assert ask(server.url, max_tokens=4).status_code == 200
        assert server.engine(other_than=pid) != pid


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_engine_outlives_its_server(how: signal.Signals, tmp_path: Path) -> None:
    with served_by_process(tmp_path) as served:
        pid = Server(served.url, served.process.pid, frozenset()).engine()
        served.send(how)
        served.wait()
        gone = lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()  # noqa: E731
        wait_until(gone, "the engine process is gone")


POISON = """
import os, sys
if "kiln.backends.engine_host" in sys.orig_argv:
    import kiln.backends.llamacpp as backend
    execute = backend.LlamaRunner.execute
    def poisoned(self, call):
        if call.rows >= 400:
            os.abort()
        return execute(self, call)
    backend.LlamaRunner.execute = poisoned
"""


def test_a_prompt_that_kills_the_engine_is_not_sent_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(POISON)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with serving() as server, ThreadPoolExecutor(2) as pool:
        first = server.engine()
        poisoned = pool.submit(ask, server.url, messages=[{"role": "user", "content": "1+1=? " * 200}])
        response = poisoned.result()
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_failed"
        assert server.engine(other_than=first) != first
        assert ask(server.url, max_tokens=4).status_code == 200
