"""`POST /v1/completions/batch` and `POST /v1/completions` (prompt scoring)."""

from __future__ import annotations

import asyncio
import time

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kiln.chat.exchange.exchange import Exchange
from kiln.chat.preparing.prepare import Prepared
from kiln.chat.scoring import prepare_scoring
from kiln.chat.service import ChatService
from kiln.core.completion import ChoiceEnd
from kiln.core.errors import RequestError
from kiln.core.scoring import ScoredPrompt
from kiln.core.turn import ChatTurn
from kiln.dialects.batch import decode_batch, to_batch_response, to_turns
from kiln.dialects.rollouts import fingerprint
from kiln.dialects.scoring import decode_scoring, to_scoring_response
from kiln.engine.ports import GenerationRequest
from kiln.http.admission import admitted
from kiln.http.body import read_json_body
from kiln.http.counting import note_begun
from kiln.http.sse import unless_disconnected
from kiln.http.state import ServerState
from kiln.wire.completions import BatchCompletionRequest, TextCompletionRequest


async def batch_completions(request: Request) -> Response:
    state: ServerState = request.app.state.kiln
    entered = time.monotonic()
    body = await read_json_body(request)

    def prepare(wire: BatchCompletionRequest, service: ChatService) -> list[Prepared]:
        prepared = [_prepare_prompt(service, turn, index) for index, turn in enumerate(to_turns(wire))]
        service.ensure_possible(sum(len(p.requests) for p in prepared), "prompts")
        return prepared

    async with admitted(state, request, lambda: decode_batch(body), prepare) as (service, prepared):
        service.engine.ensure_room(sum(len(p.requests) for p in prepared))
        exchanges = [service.start(p, entered=entered) for p in prepared]
    try:
        choices = await unless_disconnected(request.receive, _collect_all(exchanges))
    except ClientDisconnect:
        return Response(status_code=499)
    finally:
        for exchange in exchanges:
            exchange.abandon()
    response = to_batch_response(
        choices,
        [len(p.prompt_ids) for p in prepared],
        service.model.id,
        prepared[0].budget,
    )
    return Response(msgspec.json.encode(response), media_type="application/json")


def _prepare_prompt(service: ChatService, turn: ChatTurn, index: int) -> Prepared:
    """Prepare one prompt; a refusal that speaks of `messages` names the prompt instead."""
    try:
        return service.prepare(turn)
    except RequestError as error:
        if error.param is not None and error.param.startswith("messages"):
            error.param = f"prompts[{index}]{error.param.removeprefix('messages')}"
        raise


async def _collect_all(exchanges: list[Exchange]) -> list[list[ChoiceEnd | None]]:
    return await asyncio.gather(*(exchange.collect_each() for exchange in exchanges))


async def score_prompt(request: Request) -> Response:
    state: ServerState = request.app.state.kiln
    entered = time.monotonic()
    body = await read_json_body(request)

    def prepare(wire: TextCompletionRequest, service: ChatService) -> tuple[GenerationRequest, str]:
        model = service.model
        scoring = prepare_scoring(
            wire.prompt,
            wire.prompt_logprobs,
            model_id=wire.model,
            add_special=wire.add_special_tokens,
            model=model,
        )
        return scoring, fingerprint(model.policy())

    async with admitted(state, request, lambda: decode_scoring(body), prepare) as (service, made):
        scoring, address = made
        try:
            run = service.score(scoring, entered=entered, on_begin=lambda: note_begun(request))
            positions = await unless_disconnected(request.receive, run)
        except ClientDisconnect:
            return Response(status_code=499)
        model = service.model
        scored = ScoredPrompt(model.id, address, tuple(scoring.prompt_ids), positions)
        content = await service.in_worker(
            lambda: msgspec.json.encode(to_scoring_response(scored, model.tokenizer.pieces))
        )
    return Response(content, media_type="application/json")
