"""A whole server is killed while facts are written to it: what it had acknowledged is there afterwards."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

URL = "/lmkit/v1/memory/home"
WRITERS = 3


@contextmanager
def started(path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KILN_")}
    environment |= {"KILN_STORE_PATH": str(path), "KILN_ENGINE_THREADS": "1", "KILN_ENGINE_MODE": "inline"}
    process = subprocess.Popen(
        [sys.executable, "-m", "kiln", "serve", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        cwd=path.parent,
        text=True,
    )
    try:
        assert process.stdout is not None
        match = re.search(r"at (http://\S+)", process.stdout.readline())
        assert match is not None
        yield process, match[1]
    finally:
        process.kill()
        process.communicate(timeout=60)


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

    with started(path) as (process, url):
        writers = [threading.Thread(target=write, args=(url, i)) for i in range(WRITERS)]
        for writer in writers:
            writer.start()
        assert enough.wait(60)
        process.send_signal(signal.SIGKILL)
        for writer in writers:
            writer.join(60)
        assert process.wait(60) == -signal.SIGKILL
    with started(path) as (_, url), httpx.Client(base_url=url, timeout=60) as client:
        lines = client.get(f"{URL}/export").text.splitlines()
        stored = {json.loads(line)["text"] for line in lines}
        assert len(acknowledged) >= 60
        assert set(acknowledged) <= stored
        # At most the writes that were under way are there without having been acknowledged.
        assert len(stored) <= len(acknowledged) + WRITERS
        found = client.get(URL, params={"q": "writer 1 number 3"}).json()["facts"]
        assert found
