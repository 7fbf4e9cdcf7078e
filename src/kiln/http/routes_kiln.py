"""`POST /v1/chat/completions`: the Kiln contract over HTTP."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kiln.chat.prepare import Prepared
from kiln.chat.service import ChatService, Exchange
from kiln.core.completion import ExchangeEvent
from kiln.core.errors import InternalError, KilnError
from kiln.dialects.kiln import ChunkEncoder, ReplyOptions, decode_chat, to_response, to_turn
from kiln.http.admission import admitted
from kiln.http.body import read_json_body
from kiln.http.problems import error_body
from kiln.http.sse import EventStream, unless_disconnected
from kiln.http.state import ServerState
from kiln.wire.kiln import ChatCompletionRequest

log = logging.getLogger(__name__)


async def chat_completions(request: Request) -> Response:
    state: ServerState = request.app.state.kiln
    entered = time.monotonic()
    body = await read_json_body(request, state.settings.server.max_body_bytes)

    def prepare(wire: ChatCompletionRequest, service: ChatService) -> tuple[Prepared, ReplyOptions]:
        options = state.reply_options(wire, service)
        return service.prepare(to_turn(wire, performance=options.performance)), options

    async with admitted(state, request, lambda: decode_chat(body), prepare) as (service, made):
        prepared, options = made
        exchange = service.start(prepared, entered=entered)
    if options.stream:
        return await _stream(request, exchange, options)
    try:
        completion = await unless_disconnected(request.receive, exchange.collect())
    except ClientDisconnect:
        return Response(status_code=499)
    finally:
        exchange.abandon()
    return Response(msgspec.json.encode(to_response(completion, options)), media_type="application/json")


async def _stream(request: Request, exchange: Exchange, options: ReplyOptions) -> Response:
    """Answer with a stream. A failure before the first token is still a plain HTTP error."""
    events = exchange.events()
    try:
        first = await unless_disconnected(request.receive, _next(events))
    except ClientDisconnect:
        exchange.abandon()
        return Response(status_code=499)
    except BaseException:
        exchange.abandon()
        raise
    return EventStream(_encode(exchange, options, first, events))


async def _next(events: AsyncIterator[list[ExchangeEvent]]) -> list[ExchangeEvent]:
    return await anext(events)


async def _encode(
    exchange: Exchange,
    options: ReplyOptions,
    first: list[ExchangeEvent],
    events: AsyncIterator[list[ExchangeEvent]],
) -> AsyncIterator[bytes]:
    encoder = ChunkEncoder(exchange.head, options)
    try:
        yield encoder.opening() + encoder.encode(first)
        async for batch in events:
            yield encoder.encode(batch)
    except KilnError as error:
        # The status line is out: the contract's only event for this is an error without [DONE].
        yield b"data: " + error_body(error) + b"\n\n"
    except Exception:
        log.exception("a stream failed")
        yield b"data: " + error_body(InternalError("the server failed while streaming")) + b"\n\n"
    finally:
        exchange.abandon()
