"""The engine's own process dies, and the server lives on: real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from kiln.cli.embedded import embedded_server
from kiln.core.settings import Settings

DEADLINE_S = 60.0


def children(pid: int) -> list[int]:
    """Process ids of the direct children."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(status.parent.name))
    return found


def engine_pid(parent: int) -> int | None:
    for pid in children(parent):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"kiln.backends.engine_host" in command:
            return pid
    return None


def wait_for_engine(parent: int, *, other_than: int | None = None) -> int:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        pid = engine_pid(parent)
        if pid is not None and pid != other_than:
            return pid
        time.sleep(0.05)
    raise AssertionError("no engine process came up")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with embedded_server(Settings.default()) as base:
        yield base


def ask(url: str, **fields: object) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "Think forever."}], **fields}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=DEADLINE_S)


def stream(url: str) -> str:
    """The body of a long stream, however it ends."""
    body = {
        "messages": [{"role": "user", "content": "Think forever."}],
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=DEADLINE_S) as response:
        return response.read().decode()


def test_the_server_loads_no_weights_and_says_how_it_runs(url: str) -> None:
    facts = httpx.get(f"{url}/v1/config").json()["resolved"]["engine"]
    assert facts["isolation"] == "process"
    assert facts["exactness"]["proven"] is True


def test_a_killed_engine_ends_running_requests_and_serves_the_next(url: str) -> None:
    for _ in range(3):
        pid = wait_for_engine(os.getpid())
        with ThreadPoolExecutor(12) as pool:
            streams = [pool.submit(stream, url) for _ in range(4)]
            plain = [pool.submit(ask, url, max_tokens=1500, ignore_eos=True) for _ in range(4)]
            deadline = time.monotonic() + DEADLINE_S
            while "kiln_engine_running 8.0" not in httpx.get(f"{url}/metrics").text:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            os.kill(pid, signal.SIGKILL)
            for answer in plain:
                response = answer.result()
                assert response.status_code == 503
                assert response.json()["error"]["code"] == "engine_failed"
            for text in (s.result() for s in streams):
                assert '"code":"engine_failed"' in text
                assert "[DONE]" not in text
        # The next request may come before the successor is ready: it waits.
        response = ask(url, max_tokens=8)
        assert response.status_code == 200
        assert wait_for_engine(os.getpid(), other_than=pid) != pid
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}


def test_waiting_requests_survive_a_killed_engine() -> None:
    settings = Settings.build({"engine.parallel": 1}, {})
    with embedded_server(settings) as url, ThreadPoolExecutor(6) as pool:
        before = engine_pid(os.getpid())
        running = pool.submit(ask, url, max_tokens=3000, ignore_eos=True)
        deadline = time.monotonic() + DEADLINE_S
        while "kiln_engine_running 1.0" not in httpx.get(f"{url}/metrics").text:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        waiting = [pool.submit(ask, url, max_tokens=4) for _ in range(4)]
        while "kiln_engine_waiting 4.0" not in httpx.get(f"{url}/metrics").text:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert before is not None
        for pid in children(os.getpid()):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"kiln.backends.engine_host" in command and pid != 0:
                os.kill(pid, signal.SIGKILL)
        assert running.result().status_code == 503
        assert [answer.result().status_code for answer in waiting] == [200] * 4


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_engine_outlives_its_server(how: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kiln", "serve", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        for line in server.stdout:
            if "serves" in line:
                break
        pid = wait_for_engine(server.pid)
        server.send_signal(how)
        server.wait(DEADLINE_S)
        deadline = time.monotonic() + DEADLINE_S
        while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text():
            assert time.monotonic() < deadline, "the engine process stayed behind"
            time.sleep(0.05)
