"""The child's side: bound itself, do the work, write one letter and the result."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

from kiln.confine.run import FAILED, OUT_OF_MEMORY, RESULT


def main() -> None:
    work, memory_bytes, cpu_seconds = sys.argv[1:4]
    module, _, name = work.partition(":")
    function: Callable[[bytes], bytes] = getattr(importlib.import_module(module), name)
    _bound(int(memory_bytes), int(cpu_seconds))
    try:
        sys.stdout.buffer.write(RESULT + function(sys.stdin.buffer.read()))
    except MemoryError:
        sys.stdout.buffer.write(OUT_OF_MEMORY)
    except Exception as error:
        sys.stdout.buffer.write(FAILED + type(error).__name__.encode())


def _bound(memory_bytes: int, cpu_seconds: int) -> None:
    try:
        import resource
    except ImportError:
        # Windows has no such limits; the parent's clock is all there is.
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


if __name__ == "__main__":
    main()
