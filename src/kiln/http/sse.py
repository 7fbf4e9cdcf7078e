"""Server-sent events, and noticing that a client has gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

# Where the scope keeps the `send` that bypasses the middlewares.
DIRECT_SEND = "kiln.direct_send"


# Sends the bytes of some events.
Write = Callable[[bytes], Awaitable[None]]


class EventStream(Response):
    """A text/event-stream of what `pump` writes. `pump` is cancelled as soon as the client goes.

    It writes rather than yields: a generator less on the way of every token.
    """

    media_type = "text/event-stream"

    def __init__(self, pump: Callable[[Write], Coroutine[Any, Any, None]]) -> None:
        self._write_events = pump
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
        def write(chunk: bytes) -> Awaitable[None]:
            return send({"type": "http.response.body", "body": chunk, "more_body": True})

        await self._write_events(write)
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
