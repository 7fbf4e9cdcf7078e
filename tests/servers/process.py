"""`kiln serve` as a process of its own, for tests that send it signals or kill it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .server import wait_until


class Served:
    """A real `kiln serve` that answers at `url`. It runs in `folder`, and its log is a file there.
    `banner` is what it printed when it was ready.

    Settings are those of the keywords, as `engine__parallel=2`, and no others of the environment.
    """

    def __init__(self, folder: Path, **settings: object) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KILN_")}
        for name, value in {"engine__threads": 1, **settings}.items():
            environment[f"KILN_{name.replace('__', '_').upper()}"] = str(value)
        self._log = (folder / "log").open("wb+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kiln", "serve", "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            cwd=folder,
        )
        assert self.process.stdout is not None
        self._printed = self.process.stdout
        os.set_blocking(self._printed.fileno(), False)
        try:
            self.banner = self._wait_for_banner()
        except BaseException:
            self.close()
            raise
        found = re.search(r"http://\S+:\d+", self.banner)
        assert found is not None
        self.url = found[0]

    def _wait_for_banner(self) -> str:
        printed = b""

        def is_ready() -> bool:
            nonlocal printed
            printed += self._printed.read() or b""
            assert self.process.poll() is None, self.log()
            return b"Ctrl-C stops the server" in printed

        wait_until(is_ready, "kiln serve is ready", within_s=120)
        return printed.decode()

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode()

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, within_s: float = 60) -> int:
        return self.process.wait(within_s)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._printed.close()
        self._log.close()


@contextmanager
def served_by_process(folder: Path, **settings: object) -> Iterator[Served]:
    """Killed at the end of the context, unless it has ended."""
    served = Served(folder, **settings)
    try:
        yield served
    finally:
        served.close()
