"""Server-sent events, and noticing that a client has gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

# Where the scope keeps the `send` that bypasses the middlewares.
DIRECT_SEND = "kiln.direct_send"


class EventStream(Response):
    """Streams byte chunks as text/event-stream. The source is closed as soon as the client goes."""

    media_type = "text/event-stream"

    def __init__(self, source: AsyncIterator[bytes]) -> None:
        self._source = source
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The base class would announce a length of zero.
        headers = [(k, v) for k, v in self.raw_headers if k != b"content-length"]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        with contextlib.suppress(ClientDisconnect):
            await unless_disconnected(receive, self._pump(scope.get(DIRECT_SEND, send)))

    async def _pump(self, send: Send) -> None:
        async for chunk in self._source:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; cancel it and raise ClientDisconnect when the client goes first.

    The request body must have been read before.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for pending in (task, watcher):
            if not pending.done():
                pending.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
