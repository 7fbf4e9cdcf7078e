"""An exchange's events as a streamed response."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kiln.core.completion import ExchangeEvent
from kiln.core.errors import InternalError, KilnError
from kiln.http.problems import error_body
from kiln.http.sse import EventStream, unless_disconnected

log = logging.getLogger(__name__)

Batches = AsyncIterator[list[ExchangeEvent]]


class Encoder(Protocol):
    """Turns events into the bytes of server-sent events."""

    def opening(self) -> bytes: ...

    def encode(self, events: Iterable[ExchangeEvent]) -> bytes: ...

    def closing(self) -> bytes: ...


async def stream_events(
    request: Request, events: Batches, encoder: Encoder, abandon: Callable[[], None]
) -> Response:
    """Answer with a stream. A failure before the first token is still a plain HTTP error.

    `abandon` is called when nobody reads any more, however that came.
    """
    try:
        first = await unless_disconnected(request.receive, _next(events))
    except ClientDisconnect:
        abandon()
        return Response(status_code=499)
    except BaseException:
        abandon()
        raise
    return EventStream(_encode(first, events, encoder, abandon))


async def _next(events: Batches) -> list[ExchangeEvent]:
    return await anext(events)


async def _encode(
    first: list[ExchangeEvent], events: Batches, encoder: Encoder, abandon: Callable[[], None]
) -> AsyncIterator[bytes]:
    try:
        yield encoder.opening() + encoder.encode(first)
        async for batch in events:
            yield encoder.encode(batch)
        closing = encoder.closing()
        if closing:
            yield closing
    except KilnError as error:
        # The status line is out: the only event for this is an error without [DONE].
        yield b"data: " + error_body(error) + b"\n\n"
    except Exception:
        log.exception("a stream failed")
        yield b"data: " + error_body(InternalError("the server failed while streaming")) + b"\n\n"
    finally:
        abandon()
