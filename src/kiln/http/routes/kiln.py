"""`POST /v1/chat/completions`: the Kiln contract over HTTP."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kiln.chat.preparing.prepare import Prepared
from kiln.chat.service import ChatService
from kiln.dialects.kiln import decode_chat, to_turn
from kiln.dialects.kiln_reply import ChunkEncoder, ReplyOptions, to_response
from kiln.http.admission import admitted
from kiln.http.body import read_json_body
from kiln.http.sse import unless_disconnected
from kiln.http.state import ServerState
from kiln.http.streams import stream_events
from kiln.wire.kiln import ChatCompletionRequest


async def chat_completions(request: Request) -> Response:
    state: ServerState = request.app.state.kiln
    entered = time.monotonic()
    body = await read_json_body(request)

    def prepare(wire: ChatCompletionRequest, service: ChatService) -> tuple[Prepared, ReplyOptions]:
        options = state.reply_options(wire, service)
        prepared = service.prepare(to_turn(wire, performance=options.performance))
        return prepared, options.with_adapter(prepared.adapters.identity)

    async with admitted(state, request, lambda: decode_chat(body), prepare) as (service, made):
        prepared, options = made
        exchange = service.start(prepared, entered=entered)
    if options.stream:
        encoder = ChunkEncoder(exchange.head, options)
        return await stream_events(request, exchange.events(), encoder, exchange.abandon)
    try:
        completion = await unless_disconnected(request.receive, exchange.collect())
    except ClientDisconnect:
        return Response(status_code=499)
    finally:
        exchange.abandon()
    return Response(msgspec.json.encode(to_response(completion, options)), media_type="application/json")
