"""Threads that prepare requests, between callers: nobody waits behind the backlog of another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest

from kiln.chat.preparing.workers import MAX_WAITING, MAX_WAITING_OF_ONE, MOST_OF_ONE, Workers
from kiln.core.access import CALLER, Identity
from kiln.core.errors import QueueFull


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    workers = Workers()
    yield workers
    await workers.close()


class Slow:
    """Work that ends when it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = 0
        self._lock = threading.Lock()

    def __call__(self) -> str:
        with self._lock:
            self.begun += 1
        assert self.go.wait(60)
        return "done"

    async def has_begun(self, count: int) -> None:
        async with asyncio.timeout(30):
            while self.begun < count:
                await asyncio.sleep(0.005)


def run_as(owner: str, workers: Workers, work: Callable[[], str]) -> asyncio.Task[str]:
    async def run() -> str:
        CALLER.set(Identity(owner))
        return await workers.run(work)

    return asyncio.create_task(run())


async def test_another_caller_does_not_wait_behind_a_backlog(workers: Workers) -> None:
    slow = Slow()
    backlog = [run_as("ann", workers, slow) for _ in range(20)]
    await slow.has_begun(MOST_OF_ONE)
    for _ in range(10):
        assert await asyncio.wait_for(run_as("bob", workers, lambda: "bob's"), 30) == "bob's"
    assert slow.begun == MOST_OF_ONE
    slow.go.set()
    assert set(await asyncio.gather(*backlog)) == {"done"}


async def test_who_left_keeps_his_threads_until_they_are_free(workers: Workers) -> None:
    """Else sending and hanging up at once would take them all."""
    slow = Slow()
    for _ in range(3):
        gone = [run_as("ann", workers, slow) for _ in range(5)]
        await slow.has_begun(MOST_OF_ONE)
        for task in gone:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    assert workers.waiting == 0
    assert await asyncio.wait_for(run_as("bob", workers, lambda: "bob's"), 30) == "bob's"
    assert slow.begun == MOST_OF_ONE
    slow.go.set()
    assert await asyncio.wait_for(run_as("ann", workers, lambda: "again"), 30) == "again"


async def test_work_that_raises_gives_its_place_back(workers: Workers) -> None:
    def fail() -> str:
        raise LookupError("no")

    for _ in range(3 * MOST_OF_ONE):
        with pytest.raises(LookupError):
            await run_as("ann", workers, fail)
    assert await asyncio.wait_for(run_as("ann", workers, lambda: "well"), 30) == "well"


async def test_too_much_that_waits_is_refused(workers: Workers) -> None:
    slow = Slow()
    waiting = [run_as("ann", workers, slow) for _ in range(MAX_WAITING_OF_ONE)]
    await slow.has_begun(MOST_OF_ONE)
    with pytest.raises(QueueFull):
        await run_as("ann", workers, lambda: "ann's")
    assert await asyncio.wait_for(run_as("bob", workers, lambda: "bob's"), 30) == "bob's"
    waiting += [run_as("cid", workers, slow) for _ in range(MAX_WAITING - MAX_WAITING_OF_ONE)]
    await slow.has_begun(MOST_OF_ONE + 1)
    with pytest.raises(QueueFull):
        await run_as("bob", workers, lambda: "bob's")
    slow.go.set()
    assert len(await asyncio.gather(*waiting)) == MAX_WAITING


async def test_callers_who_have_left_are_forgotten(workers: Workers) -> None:
    for at in range(20):
        await run_as(f"caller {at}", workers, lambda: "")
    await asyncio.sleep(0.05)
    assert len(workers._callers) <= 1
