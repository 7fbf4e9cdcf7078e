"""Servers with an engine process of their own, and how to find that process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from kiln.cli.embedded import embedded_server
from kiln.core.settings import Settings
from servers.server import wait_until

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
        own: set[int] = set()

        def is_up() -> bool:
            own.clear()
            own.update(engine_pids(self.parent) - self.others - {other_than})
            return len(own) == 1

        wait_until(is_up, "an engine process is up")
        return own.pop()


@contextmanager
def serving(**values: object) -> Iterator[Server]:
    others = frozenset(engine_pids(os.getpid()))
    with embedded_server(Settings.build({f"engine.{k}": v for k, v in values.items()}, {})) as url:
        yield Server(url, os.getpid(), others)


def wait_for_metric(url: str, line: str) -> None:
    wait_until(lambda: line in httpx.get(f"{url}/metrics").text, line)
