"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def interleaved(streams: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """What the streams yield as it comes, each item with the position of its stream.

    Raises what a stream raises; the others are then cancelled, as they are when this is closed.
    """
    # The last item of each stream is None, or the error that ended it.
    ready: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()

    async def forward(index: int, stream: AsyncIterator[T]) -> None:
        try:
            async for item in stream:
                ready.put_nowait((index, item))
            ready.put_nowait(None)
        except Exception as error:
            ready.put_nowait(error)

    tasks = [asyncio.ensure_future(forward(i, stream)) for i, stream in enumerate(streams)]
    left = len(tasks)
    try:
        while left:
            entry = await ready.get()
            if isinstance(entry, Exception):
                raise entry
            if entry is None:
                left -= 1
            else:
                yield entry
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
