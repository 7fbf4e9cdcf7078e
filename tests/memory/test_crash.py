"""A whole server is killed while facts are written to it: what it had acknowledged is there afterwards."""

from __future__ import annotations

import json
import signal
import threading
from contextlib import AbstractContextManager
from pathlib import Path

import httpx

from servers.process import Served, served_by_process

URL = "/lmkit/v1/memory/home"
WRITERS = 3


def started(path: Path) -> AbstractContextManager[Served]:
    return served_by_process(path.parent, store__path=path, engine__mode="inline")


def test_no_acknowledged_fact_is_lost_when_the_server_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "kiln.db"
    acknowledged: list[str] = []
    enough = threading.Event()

    def write(url: str, writer: int) -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            for i in range(10_000):
                text = f"writer {writer} wrote number {i}"
                try:
                    response = client.post(URL, json={"text": text})
                except httpx.HTTPError:
                    return
                assert response.status_code == 201, response.text
                acknowledged.append(text)
                if len(acknowledged) >= 60:
                    enough.set()

    with started(path) as served:
        writers = [threading.Thread(target=write, args=(served.url, i)) for i in range(WRITERS)]
        for writer in writers:
            writer.start()
        assert enough.wait(60)
        served.send(signal.SIGKILL)
        for writer in writers:
            writer.join(60)
        assert served.wait() == -signal.SIGKILL
    with started(path) as served, httpx.Client(base_url=served.url, timeout=60) as client:
        lines = client.get(f"{URL}/export").text.splitlines()
        stored = {json.loads(line)["text"] for line in lines}
        assert len(acknowledged) >= 60
        assert set(acknowledged) <= stored
        # At most the writes that were under way are there without having been acknowledged.
        assert len(stored) <= len(acknowledged) + WRITERS
        found = client.get(URL, params={"q": "writer 1 number 3"}).json()["facts"]
        assert found
