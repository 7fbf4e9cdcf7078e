"""The threads that prepare requests: decoding, rendering, tokenizing, trying grammars."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar
from weakref import WeakValueDictionary

from kiln.core.access import current_owner
from kiln.core.errors import QueueFull

T = TypeVar("T")

# Rendering and tokenizing hold the interpreter lock for most of their time: more threads of one caller gain
# nothing. There is one more than a caller may have, so who sends much or slow work holds up himself.
MOST_OF_ONE = 2
THREADS = MOST_OF_ONE + 1
MAX_WAITING = 512
# Of one caller: the rest is for others.
MAX_WAITING_OF_ONE = 384
# Some of llama.cpp's pre-tokenizers recurse once a character: about 300 bytes of stack each.
STACK = 256 * 1024 * 1024


class _Caller:
    def __init__(self) -> None:
        self.places = asyncio.Semaphore(MOST_OF_ONE)
        self.waiting = 0


class Workers:
    """Runs computing work off the event loop, on which it lives.

    A caller (the owner of the key) has two threads at most; what else it sends waits without one. So the
    threads' queue holds two works of each caller, and nobody waits behind the backlog of another.
    """

    def __init__(self) -> None:
        self._pool = _start_pool()
        self._callers: WeakValueDictionary[str, _Caller] = WeakValueDictionary()
        self.waiting = 0

    def soon(self, function: Callable[[], None]) -> None:
        """Run something that nobody waits for."""
        self._pool.submit(function)

    async def run(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises. Raises QueueFull when too much waits."""
        with self.busy() as caller:
            return await self._run(function, caller)

    @contextmanager
    def busy(self) -> Iterator[_Caller]:
        """Count as work that waits. Raises QueueFull when too much does."""
        caller = self._callers.setdefault(current_owner(), _Caller())
        if self.waiting >= MAX_WAITING or caller.waiting >= MAX_WAITING_OF_ONE:
            raise QueueFull(f"{self.waiting} requests are being prepared")
        self.waiting += 1
        caller.waiting += 1
        try:
            yield caller
        finally:
            self.waiting -= 1
            caller.waiting -= 1

    async def _run(self, function: Callable[[], T], caller: _Caller) -> T:
        await caller.places.acquire()
        loop = asyncio.get_running_loop()

        def release(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits
                loop.call_soon_threadsafe(caller.places.release)

        try:
            future = self._pool.submit(function)
        except BaseException:
            caller.places.release()
            raise
        # Not when the caller leaves: a thread that has begun is busy until it has finished.
        future.add_done_callback(release)
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        await asyncio.to_thread(self._pool.shutdown, wait=True, cancel_futures=True)


def _start_pool() -> ThreadPoolExecutor:
    """The threads, started at once: only while they start can their stack be set."""
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="kiln-prepare")
    started = threading.Barrier(THREADS + 1)
    before = threading.stack_size(STACK)
    try:
        for _ in range(THREADS):
            pool.submit(started.wait)
    finally:
        threading.stack_size(before)
    started.wait()
    return pool
