"""An exchange's events as a streamed response."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kiln.core.completion import ExchangeEvent
from kiln.core.errors import InternalError, KilnError
from kiln.http.problems import error_body
from kiln.http.sse import EventStream, Write, unless_disconnected

log = logging.getLogger(__name__)

Batches = AsyncIterator[list[ExchangeEvent]]


class Encoder(Protocol):
    """Turns events into the bytes of server-sent events."""

    def opening(self) -> bytes: ...

    def encode(self, events: Sequence[ExchangeEvent]) -> bytes: ...

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

    async def pump(write: Write) -> None:
        try:
            await write(encoder.opening() + encoder.encode(first))
            async for batch in events:
                await write(encoder.encode(batch))
            await write(encoder.closing())
        except KilnError as error:
            # The status line is out: the only event for this is an error without [DONE].
            await write(b"data: " + error_body(error) + b"\n\n")
        except Exception:
            log.exception("a stream failed")
            await write(b"data: " + error_body(InternalError("the server failed while streaming")) + b"\n\n")
        finally:
            abandon()

    return EventStream(pump)


async def _next(events: Batches) -> list[ExchangeEvent]:
    return await anext(events)
