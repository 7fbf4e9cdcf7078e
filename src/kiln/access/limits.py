"""How much each key may do at once and in a minute."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from kiln.core.errors import TooManyAtOnce, TooManyPerMinute
from kiln.core.wording import counted
from kiln.store.keys import Key

WINDOW_S = 60.0


class Limits:
    """Counts the requests of keys that have limits. Lives on the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: dict[int, int] = {}
        self._begun: dict[int, deque[float]] = {}

    def enter(self, key: Key) -> Callable[[], None]:
        """Count a request; the returned function ends it, once however often it is called.

        In any 60 seconds no more than `rate_per_minute` requests begin. One that is refused counts for
        nothing. Raises TooManyAtOnce or TooManyPerMinute.
        """
        running = self._running.get(key.id, 0)
        if key.max_concurrency is not None and running >= key.max_concurrency:
            raise TooManyAtOnce(
                f"{counted(running, 'request')} of the key {key.name}"
                f" {'is' if running == 1 else 'are'} running, at most {key.max_concurrency} may"
            )
        if key.rate_per_minute is not None:
            self._count(key, key.rate_per_minute)
        self._running[key.id] = running + 1
        left = [key.id]

        def leave() -> None:
            if left:
                self._leave(left.pop())

        return leave

    def _count(self, key: Key, most: int) -> None:
        now = self._clock()
        begun = self._begun.setdefault(key.id, deque())
        while begun and begun[0] <= now - WINDOW_S:
            begun.popleft()
        if len(begun) >= most:
            error = TooManyPerMinute(f"the key {key.name} may begin {most} requests in a minute")
            error.retry_after_s = max(1, math.ceil(begun[0] + WINDOW_S - now))
            raise error
        begun.append(now)

    def _leave(self, key_id: int) -> None:
        if self._running[key_id] > 1:
            self._running[key_id] -= 1
        else:
            del self._running[key_id]
