"""`/lmkit/v1`: the native chat, and skipping the thinking of whatever is running."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from kiln.core.errors import CannotSkip, ExchangeNotFound, InternalError, KilnError
from kiln.core.native import NativeChat, NativeEvent, Summary
from kiln.core.text import shorten
from kiln.dialects.lmkit import decode_native, files_of, to_native
from kiln.dialects.lmkit_reply import EventEncoder, to_response
from kiln.dialects.validate import decode
from kiln.http.body import read_json_body
from kiln.http.counting import note_begun
from kiln.http.guard import caller_of
from kiln.http.problems import native_error_body
from kiln.http.sse import EventStream, Write, unless_disconnected
from kiln.http.state import ServerState
from kiln.native.context import Surroundings, open_skills
from kiln.native.exchange import NativeExchange
from kiln.skills.agent import adopt
from kiln.text.files import GivenFile
from kiln.wire.lmkit import NativeChatRequest, SkipThinking

log = logging.getLogger(__name__)

# A comment, which readers of events skip.
_STILL_HERE = b":\n\n"


async def native_chat(request: Request) -> Response:
    """POST /lmkit/v1/chat"""
    state: ServerState = request.app.state.kiln
    entered = time.monotonic()
    body = await read_json_body(request)
    chat, surroundings = await unless_disconnected(request.receive, _read(state, body))
    owner, name = caller_of(request).owner, chat.turn.request_id

    def end() -> None:
        if name is not None:
            state.live.leave(owner, name, exchange)

    exchange = NativeExchange(chat, surroundings, state.means(), entered=entered, on_end=end)
    if name is not None:
        state.live.enter(owner, name, exchange)
    exchange.start()
    if chat.stream:
        return await _stream(request, exchange, EventEncoder(many=chat.turn.n > 1))
    try:
        summary, happened = await unless_disconnected(request.receive, exchange.collect())
    except ClientDisconnect:
        return Response(status_code=499)
    finally:
        exchange.abandon()
        _note(request, exchange)
    # With log-probabilities it may be large.
    answer = await asyncio.to_thread(lambda: msgspec.json.encode(to_response(summary, happened)))
    return Response(answer, media_type="application/json")


async def _read(state: ServerState, body: bytes) -> tuple[NativeChat, Surroundings]:
    """From the body to what is asked, with what the server's own files say to it."""
    in_worker = state.service.in_worker

    def finish(asked: NativeChatRequest, files: list[str] | None) -> tuple[NativeChat, Surroundings]:
        chat = to_native(asked, state.efforts(), files)
        return chat, open_skills(chat, state.skills)

    def begin() -> tuple[NativeChatRequest, list[list[GivenFile]], tuple[NativeChat, Surroundings] | None]:
        asked = decode_native(body, lambda name, stated: adopt(state.agents.get(name), stated))
        files = files_of(asked)
        return asked, files, None if any(files) else finish(asked, None)

    asked, files, finished = await in_worker(begin)
    if finished is not None:
        return finished
    texts = await state.files.read_all(files)
    return await in_worker(lambda: finish(asked, texts))


async def _stream(request: Request, exchange: NativeExchange, encoder: EventEncoder) -> Response:
    """Answer with a stream. A failure before the first event is still a plain HTTP error."""
    state: ServerState = request.app.state.kiln
    events = exchange.events()
    try:
        first = await unless_disconnected(request.receive, _next(events))
    except ClientDisconnect:
        exchange.abandon()
        return Response(status_code=499)
    except BaseException:
        exchange.abandon()
        _note(request, exchange)
        raise

    async def fail(error: KilnError, write: Write) -> None:
        if not exchange.has_begun:
            # While a model was loaded for it: the status line is out, and knows nothing of this.
            state.metrics.refused(error.code)
        await write(_error_event(error))

    async def pump(write: Write) -> None:
        try:
            await write(encoder.encode(first))
            async for batch in events:
                if not batch:
                    await write(_STILL_HERE)
                elif isinstance(batch[-1], Summary):
                    # With log-probabilities it may be large.
                    await write(await asyncio.to_thread(encoder.encode, batch))
                else:
                    await write(encoder.encode(batch))
        except KilnError as error:
            await fail(error, write)
        except Exception:
            log.exception("a native stream failed")
            await fail(InternalError("the server failed while streaming"), write)
        finally:
            exchange.abandon()

    return EventStream(pump)


def _note(request: Request, exchange: NativeExchange) -> None:
    if exchange.has_begun:
        note_begun(request)


async def _next(events: AsyncIterator[list[NativeEvent]]) -> list[NativeEvent]:
    return await anext(events)


def _error_event(error: KilnError) -> bytes:
    return b"event: error\ndata: " + native_error_body(error) + b"\n\n"


async def skip_thinking(request: Request) -> Response:
    """POST /lmkit/v1/chat/skip-thinking: 202 for a live exchange; no effect once its answer began.

    Finds exchanges of the native chat by the `request_id` of their caller, and any by its `chatcmpl-` id.
    """
    state: ServerState = request.app.state.kiln
    body = decode(await read_json_body(request), SkipThinking)
    owner = caller_of(request).owner
    named = state.live.find(owner, body.request_id)
    if named is not None:
        named.skip_thinking()
        return JSONResponse({"status": "accepted"}, status_code=202)
    exchange = state.catalog.find(body.request_id)
    # Whether another caller's exchange runs is nobody's business.
    if exchange is None or exchange.owner != owner:
        raise ExchangeNotFound(f"no running exchange {shorten(body.request_id)}", param="request_id")
    if not exchange.can_skip:
        raise CannotSkip("a rollout with provenance cannot be skipped", param="request_id")
    exchange.skip_thinking()
    return JSONResponse({"status": "accepted"}, status_code=202)
