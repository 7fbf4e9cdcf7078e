"""Child processes that are kept: each does one work for many payloads, each time within bounds.

For native code that may run too long: no thread can be freed of it, a process can. Where `run_confined`
starts a child each time, one of these answers in the time that the work takes, and only one that broke its
bounds is ended and replaced.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO, cast

from kiln.confine.frames import read_frame, write_frame
from kiln.confine.kept_child import LAST
from kiln.confine.run import (
    FAILED,
    OUT_OF_MEMORY,
    PASSED_VARIABLES,
    RESULT,
    ConfinedError,
    TookTooLong,
    TookTooMuchMemory,
)


class OutOfPatience(TookTooLong):
    """The wall's clock decided: on a machine with less to do it might have come to an end."""


class Unstartable(ConfinedError):
    """The child ended by itself: Python, its modules or its memory are not what they should be."""


@dataclass(frozen=True, slots=True)
class KeptBounds:
    """Of one payload. `cpu_seconds` is processor time, so a busy machine refuses nothing that an idle one
    takes; `wall_seconds` frees the caller where the child gets none, or its system cannot count it."""

    cpu_seconds: float
    wall_seconds: float
    memory_bytes: int


class KeptChildren:
    """As many children as callers at one time, started when they are needed. Thread-safe.

    `work` is `package.module:function`, a function from `setting` to a function from bytes to bytes.
    """

    def __init__(self, work: str, setting: bytes, bounds: KeptBounds) -> None:
        self._work = work
        self._setting = setting
        self._bounds = bounds
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._busy: set[_Child] = set()

    def start(self) -> None:
        """Have a child in reserve, which begins to get ready beside the caller."""
        with self._lock:
            if not self._idle:
                self._idle.append(self._new())

    def run(self, payload: bytes) -> bytes:
        """The work's result; blocks. Raises TookTooLong, TookTooMuchMemory, or ConfinedError if the work
        died or raised; Unstartable or OSError where no process can do any."""
        child = self._take()
        try:
            return self._ask(child, payload)
        except TookTooLong:
            raise
        except ConfinedError:
            if child.answered == 0 or child.is_dismissed:
                raise
            # It may have died before, or of what earlier payloads left behind.
            return self._ask(self._take(fresh=True), payload)

    def close(self) -> None:
        """End all children; callers that wait get a ConfinedError, later ones new children."""
        with self._lock:
            children = [*self._idle, *self._busy]
            self._idle.clear()
        for child in children:
            child.is_dismissed = True
            child.end()

    def _new(self) -> _Child:
        return _Child(self._work, self._setting, self._bounds)

    def _take(self, *, fresh: bool = False) -> _Child:
        with self._lock:
            child = self._new() if fresh or not self._idle else self._idle.pop()
            self._busy.add(child)
            return child

    def _ask(self, child: _Child, payload: bytes) -> bytes:
        try:
            return child.ask(payload)
        finally:
            self._put_back(child)

    def _put_back(self, child: _Child) -> None:
        with self._lock:
            self._busy.discard(child)
            if child.is_usable:
                self._idle.append(child)
                return
        child.end()
        if not child.is_dismissed:
            with suppress(OSError):
                # Its successor gets ready before anybody waits for it.
                self.start()


class _Child:
    def __init__(self, work: str, setting: bytes, bounds: KeptBounds) -> None:
        self.answered = 0
        # Not between a question and its answer: the next one would hear the rest of this one's.
        self.is_usable = True
        self.is_dismissed = False
        self._bounds = bounds
        self._setting: bytes | None = setting
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-B", "-P", "-m", "kiln.confine.kept_child", work),
                *(str(bounds.memory_bytes), str(bounds.cpu_seconds)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ},
            # A Ctrl-C at the server's terminal is the server's to answer.
            start_new_session=True,
        )

    def ask(self, payload: bytes) -> bytes:
        timed_out = threading.Event()
        self.is_usable = False

        def give_up() -> None:
            timed_out.set()
            self._process.kill()

        timer = threading.Timer(self._bounds.wall_seconds, give_up)
        timer.daemon = True
        timer.start()
        try:
            answer = self._exchange(payload)
        finally:
            timer.cancel()
        if answer is None:
            raise self._death(timed_out.is_set())
        kind, body = answer
        self.is_usable = kind == RESULT and not timed_out.is_set()
        if kind == OUT_OF_MEMORY:
            raise self._too_much()
        if kind == FAILED:
            raise ConfinedError(f"it failed ({body.decode('utf-8', 'replace')})")
        assert kind in (RESULT, LAST)
        self.answered += 1
        return body

    def _exchange(self, payload: bytes) -> tuple[bytes, bytes] | None:
        requests, answers = cast(BinaryIO, self._process.stdin), cast(BinaryIO, self._process.stdout)
        try:
            if self._setting is not None:
                write_frame(requests, RESULT, self._setting)
                self._setting = None
            write_frame(requests, RESULT, payload)
            return read_frame(answers)
        except (OSError, ValueError):
            # Its end of the pipe is gone, or ours is closed.
            return None

    def _death(self, timed_out: bool) -> ConfinedError:
        self._process.kill()
        ended_by = -self._process.wait()
        if timed_out:
            return OutOfPatience("it takes too long")
        if ended_by == getattr(signal, "SIGPROF", None):
            return TookTooLong("it takes too long")
        if ended_by == getattr(signal, "SIGABRT", None):
            # Native code has no other way to say so.
            return self._too_much()
        if ended_by <= 0:
            return Unstartable(f"the process for it ended with status {-ended_by}")
        return ConfinedError("it ended the process that did it")

    def _too_much(self) -> TookTooMuchMemory:
        return TookTooMuchMemory(f"it needs more than {self._bounds.memory_bytes >> 20} MiB of memory")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                cast(BinaryIO, stream).close()
