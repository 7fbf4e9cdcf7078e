"""Refusals that reach clients which are still sending."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

# Set in the scope of a request whose body has come to its end.
BODY_READ = "kiln.body_read"
# How much of a refused body is heard, and for how long.
_MOST_BYTES = 64 * 1024 * 1024
_MOST_S = 5.0


class Refusal(Response):
    """An answer that may be given before the request's body has been read.

    Closing a connection with unread data on it resets it, which throws away the answer that the client has
    not read yet (RFC 9112, 9.6). So what still comes is read after the answer, within bounds. A connection
    that is kept needs none of this: the protocol reads on by itself.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _is_still_sending(scope):
            await super().__call__(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MOST_S):
                await _hear_out(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _is_still_sending(scope: Scope) -> bool:
    """Whether the connection ends with the answer while a body may be on its way."""
    headers = Headers(scope=scope)
    ends = "close" in headers.get("connection", "").lower() or scope["http_version"] == "1.0"
    has_body = "transfer-encoding" in headers or headers.get("content-length", "0").strip("0") != ""
    # Who asks before sending is told no, and sends nothing.
    return ends and has_body and "expect" not in headers and not scope.get(BODY_READ, False)


async def _hear_out(receive: Receive) -> None:
    size = 0
    while size <= _MOST_BYTES:
        message = await receive()
        size += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body", False):
            return
