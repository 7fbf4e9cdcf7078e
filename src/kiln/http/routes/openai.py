"""`/v1/openai`: chat completions and models for OpenAI's clients."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kiln.chat.exchange.exchange import Exchange
from kiln.chat.preparing.prepare import Prepared
from kiln.chat.service import ChatService
from kiln.core.completion import Completion, ExchangeEvent
from kiln.dialects.openai.chunks import ChunkEncoder
from kiln.dialects.openai.request import ChatReply, decode_request, to_reply, to_turn
from kiln.dialects.openai.response import to_response
from kiln.dialects.openai.usage import Counting
from kiln.http.admission import admitted
from kiln.http.body import read_json_body
from kiln.http.sse import unless_disconnected
from kiln.http.state import ServerState
from kiln.http.streams import stream_events
from kiln.wire.openai_chat import ChatRequest


async def chat_completions(request: Request) -> Response:
    state: ServerState = request.app.state.kiln
    entered = time.monotonic()
    body = await read_json_body(request)

    def prepare(wire: ChatRequest, service: ChatService) -> tuple[Prepared, ChatReply]:
        return service.prepare(to_turn(wire, state.efforts())), to_reply(wire)

    async with admitted(state, request, lambda: decode_request(body), prepare) as (service, made):
        prepared, reply = made
        exchange = service.start(prepared, entered=entered)
    counting = counting_of(state, service)
    if reply.stream:
        encoder = ChunkEncoder(exchange.head, prepared.turn.n, reply, counting)
        events = events_of(state, exchange)
        return await stream_events(request, events, encoder, exchange.abandon)
    try:
        completion = await unless_disconnected(request.receive, _collect(state, exchange))
    except ClientDisconnect:
        return Response(status_code=499)
    finally:
        exchange.abandon()

    def encode() -> bytes:
        return msgspec.json.encode(to_response(completion, reply, counting))

    # Log-probabilities can be many.
    content = await service.in_worker(encode) if prepared.turn.top_logprobs is not None else encode()
    return Response(content, media_type="application/json")


async def _collect(state: ServerState, exchange: Exchange) -> Completion:
    completion = await exchange.collect()
    if state.content_filter is None:
        return completion
    return await state.content_filter.whole(completion)


def events_of(state: ServerState, exchange: Exchange) -> AsyncIterator[list[ExchangeEvent]]:
    """The events of an exchange, through the content filter where there is one."""
    if state.content_filter is None:
        return exchange.events()
    return state.content_filter.events(exchange)


def counting_of(state: ServerState, service: ChatService) -> Counting:
    keeps = service.engine.facts.get("prefix_cache") is not False
    return Counting.of(state.settings.openai, keeps_prefixes=keeps)
