"""Ctrl-C for a chat: at the prompt an exception, during an exchange a call inside its event loop."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """Holds SIGINT as long as the context lasts.

    The handler raises only while a line is being read, inside `read_line`'s own try. At any other
    time it either hands the interrupt to the running exchange's loop, which takes it between two
    steps, or keeps it for the exchange that is about to begin. So no code is ever cut in two.
    """

    def __init__(self) -> None:
        self._reading = False
        self._pending = 0
        self._deliver: Callable[[], None] | None = None
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        # Only the main thread may hold signals; elsewhere, as in tests, there is nothing to hold.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._reading:
            self._reading = False  # one signal raises once; a second finds no reader
            raise KeyboardInterrupt
        deliver = self._deliver
        if deliver is None:
            self._pending += 1
        else:
            deliver()

    def read_line(self, prompt: str) -> str:
        """A line of standard input. Raises EOFError at its end, KeyboardInterrupt for a Ctrl-C."""
        # A Ctrl-C that came after the last exchange's end was meant for that one.
        self._pending = 0
        try:
            self._reading = True
            line = input(prompt)
            self._reading = False
        finally:
            self._reading = False
        return line

    @contextmanager
    def sent_to(self, loop: asyncio.AbstractEventLoop, on_interrupt: Callable[[], None]) -> Iterator[None]:
        """Inside, each interrupt is a call of `on_interrupt` in the loop, those kept so far included."""
        # Set first, counted second: an interrupt between the two is delivered, not lost.
        self._deliver = lambda: _call(loop, on_interrupt)
        kept, self._pending = self._pending, 0
        try:
            for _ in range(kept):
                loop.call_soon(on_interrupt)
            yield
        finally:
            self._deliver = None


def _call(loop: asyncio.AbstractEventLoop, on_interrupt: Callable[[], None]) -> None:
    loop.call_soon_threadsafe(on_interrupt)
