"""The kept child's side: one answer after another, each within its own processor time."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from kiln.confine.frames import read_frame, write_frame
from kiln.confine.run import FAILED, OUT_OF_MEMORY, RESULT

# The last answer of a child that has grown, or whose state nobody knows any more.
LAST = b"L"


def main() -> None:
    work, memory, cpu = sys.argv[1:4]
    memory_bytes, cpu_seconds = int(memory), float(cpu)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    module, _, name = work.partition(":")
    setting = read_frame(requests)
    if setting is None:
        return
    function: Callable[[bytes], bytes] = getattr(importlib.import_module(module), name)(setting[1])
    _bound(memory_bytes)
    while (request := read_frame(requests)) is not None:
        _allow(cpu_seconds)
        try:
            kind, body = RESULT, function(request[1])
        except MemoryError:
            kind, body = OUT_OF_MEMORY, b""
        except BaseException as error:  # a panic of a Rust library is no Exception
            kind, body = FAILED, type(error).__name__.encode()
        _allow(0.0)
        if kind == RESULT and _has_grown(memory_bytes):
            kind = LAST
        write_frame(answers, kind, body)
        if kind != RESULT:
            return


def _bound(memory_bytes: int) -> None:
    try:
        import resource
    except ImportError:
        # Windows has no such limits; the parent's clock is all there is.
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)


def _allow(cpu_seconds: float) -> None:
    """Have the kernel end this process after so much work, whatever code is running then; 0: no more."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)


def _has_grown(memory_bytes: int) -> bool:
    """Whether so little of the bound is left that the next work might fail for what this one left."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        # Not Linux. Then a child goes on until it fails, and that work is done again by another.
        return False
    return pages * os.sysconf("SC_PAGE_SIZE") > memory_bytes // 3


if __name__ == "__main__":
    main()
