"""The engine process is killed again and again while it works: nobody hangs, nothing is left behind."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx

from .servers import DEADLINE_S, Server, engine_pids, serving, wait_for_metric

KILLS = 20
CLIENTS = 8
SEED = 20


class Load:
    """Clients that ask without a pause, one half streaming; `outcomes` counts how requests ended."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.outcomes: Counter[str] = Counter()
        self.strange: list[str] = []
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._clients: list[Future[None]] = [self._pool.submit(self._ask, n) for n in range(CLIENTS)]

    def stop(self) -> None:
        self._ended.set()
        for client in self._clients:
            client.result(DEADLINE_S)
        self._pool.shutdown()

    def _ask(self, number: int) -> None:
        rng = random.Random(number)
        while not self._ended.is_set():
            body = {
                "messages": [{"role": "user", "content": f"Count to {rng.randrange(9)}."}],
                "max_tokens": rng.choice([4, 40, 800]),
                "ignore_eos": True,
                "seed": rng.choice([None, 5]),
                "stream": number % 2 == 0,
            }
            body = {key: value for key, value in body.items() if value is not None}
            response = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=DEADLINE_S)
            self.outcomes[self._judge(response, bool(body["stream"]))] += 1

    def _judge(self, response: httpx.Response, streamed: bool) -> str:
        text = response.text
        if streamed and response.status_code == 200:
            whole, failed = text.endswith("data: [DONE]\n\n"), '"code":"engine_failed"' in text
            if whole != failed:
                return "failed stream" if failed else "stream"
        elif response.status_code == 200:
            return "answer"
        elif response.status_code == 503 and response.json()["error"]["code"] == "engine_failed":
            return "refused"
        self.strange.append(f"{response.status_code} {text[-300:]}")
        return "strange"


def test_twenty_kills_under_load() -> None:
    rng = random.Random(SEED)
    killed: list[int] = []
    with serving(parallel=4) as server:
        load = Load(server.url)
        try:
            for _ in range(KILLS):
                pid = server.engine(other_than=killed[-1] if killed else None)
                wait_for_metric(server.url, "kiln_engine_running 4.0")
                time.sleep(rng.uniform(0.0, 0.2))
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
        finally:
            load.stop()
        assert load.strange == []
        assert len(set(killed)) == KILLS
        # Four were running at every kill; most waiting ones outlived it.
        failed = load.outcomes["failed stream"] + load.outcomes["refused"]
        assert KILLS <= failed <= KILLS * CLIENTS
        assert load.outcomes["stream"] > 0 and load.outcomes["answer"] > 0
        after = httpx.post(
            f"{server.url}/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "1+1=?"}], "max_tokens": 4},
            timeout=DEADLINE_S,
        )
        assert after.status_code == 200
        assert f"kiln_engine_restarts_total {KILLS}.0" in httpx.get(f"{server.url}/metrics").text
        wait_for_metric(server.url, "kiln_engine_running 0.0")
        assert_gone(server, killed)
    assert engine_pids(server.parent) <= server.others


def assert_gone(server: Server, killed: list[int]) -> None:
    """No killed process is left, not even as a zombie."""
    assert engine_pids(server.parent) - server.others == {server.engine()}
    for pid in killed:
        status = Path(f"/proc/{pid}/stat")
        assert not status.exists() or f" {server.parent} " not in status.read_text().rpartition(")")[2][:12]
