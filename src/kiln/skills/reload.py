"""Values made from files, made anew when a file has changed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from kiln.skills.files import Fault, Faulty, Signature

T = TypeVar("T")

# Two writes within one tick of the file system's clock look alike, so what was written just now is not
# trusted to be the last word.
_SETTLED_NS = 100_000_000


@dataclass(frozen=True, slots=True)
class _Known(Generic[T]):
    signature: Signature
    outcome: T | Faulty


class Reloading(Generic[T]):
    """Answers with a file's value, and reads the file only if it differs from the one last read.

    `load` makes the value and its file's signature; what it raises as Faulty is kept and raised again,
    so a broken edit is never covered by the value before it. Synchronous, and safe to use from
    several threads: two that find a change at once both read it.
    """

    def __init__(self, load: Callable[[Path], tuple[T | Faulty, Signature]]) -> None:
        self._load = load
        self._known: dict[Path, _Known[T]] = {}
        self._lock = threading.Lock()

    def get(self, path: Path) -> T:
        """Raises FileNotFoundError, or Faulty for a file that cannot be used."""
        try:
            now = Signature.of(path.stat())
            with self._lock:
                known = self._known.get(path)
            if known is None or known.signature != now:
                outcome, signature = self._load(path)
                known = _Known(signature, outcome)
                if time.time_ns() - max(signature.modified_ns, signature.changed_ns) > _SETTLED_NS:
                    with self._lock:
                        self._known[path] = known
        except (FileNotFoundError, NotADirectoryError):
            with self._lock:
                self._known.pop(path, None)
            raise FileNotFoundError(path.name) from None
        except OSError as error:
            raise Faulty(Fault(f"it cannot be looked at: {os.strerror(error.errno or 0)}")) from None
        if isinstance(known.outcome, Faulty):
            raise Faulty(*known.outcome.faults)
        return known.outcome
