"""Servers with an engine process of their own, and how to find that process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

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


def engine_pids(parent: int) -> set[int]:
    found = set()
    for pid in children(parent):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"kiln.backends.engine_host" in command:
            found.add(pid)
    return found


@dataclass(frozen=True)
class Server:
    """A server in this process; other servers of the test session have engines of their own."""

    url: str
    parent: int
    others: frozenset[int]

    def engine(self, *, other_than: int | None = None) -> int:
        """The process id of the server's engine, as soon as it has one."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            own = engine_pids(self.parent) - self.others - {other_than}
            if len(own) == 1:
                return own.pop()
            time.sleep(0.05)
        raise AssertionError("no engine process came up")


@contextmanager
def serving(**values: object) -> Iterator[Server]:
    others = frozenset(engine_pids(os.getpid()))
    with embedded_server(Settings.build({f"engine.{k}": v for k, v in values.items()}, {})) as url:
        yield Server(url, os.getpid(), others)


def wait_for_metric(url: str, line: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while line not in httpx.get(f"{url}/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.02)
