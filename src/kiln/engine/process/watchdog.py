"""Notices a worker that owes a report and does not give it.

A worker reports after every command that it takes while it is idle and after every step, so one that
was told something, or has requests, and is silent for longer than any step takes, hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# Reports may lie unread because this process itself was held up: they get so long to be read.
GRACE_S = 1.0


class Watchdog:
    """Calls `on_hang` once when a report is owed for `timeout_s`; never with None. For the event loop."""

    def __init__(self, timeout_s: float | None, on_hang: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._on_hang = on_hang
        self._owed_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def expect(self) -> None:
        """The worker was told something: it owes a report from now on, if it did not before."""
        if self._owed_since is None and self._timeout_s is not None:
            self._owed_since = asyncio.get_running_loop().time()
            self._arm(self._owed_since + self._timeout_s)

    def heard(self, *, owes_more: bool) -> None:
        """A report came. With requests left there is another one to come."""
        self._owed_since = None
        if owes_more:
            self.expect()

    def rest(self) -> None:
        """Nothing is owed: the worker has ended."""
        self._owed_since = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, when: float) -> None:
        # One timer for many reports: it finds out when it fires whether it is still meant.
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(when, self._check)

    def _check(self) -> None:
        self._timer = None
        if self._owed_since is None or self._timeout_s is None:
            return
        loop = asyncio.get_running_loop()
        due = self._owed_since + self._timeout_s
        if loop.time() < due:
            self._arm(due)
        else:
            self._timer = loop.call_later(GRACE_S, self._strike, self._owed_since)

    def _strike(self, owed_since: float) -> None:
        self._timer = None
        if self._owed_since == owed_since:
            self._owed_since = None
            self._on_hang()
        elif self._owed_since is not None and self._timeout_s is not None:
            self._arm(self._owed_since + self._timeout_s)
