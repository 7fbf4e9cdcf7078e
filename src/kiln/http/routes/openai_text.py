"""`/v1/openai`: text completions, and texts to token ids and back."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kiln.chat.exchange.exchange import Exchange
from kiln.chat.exchange.interleave import interleaved
from kiln.chat.models.served import ServedModel
from kiln.chat.preparing.prepare import Prepared, tokens_of
from kiln.chat.preparing.raw import read_raw, text_of
from kiln.chat.scoring import prepare_scoring
from kiln.chat.service import ChatService
from kiln.core.completion import ChoiceEnd, ExchangeEvent, TextDelta
from kiln.core.errors import RequestError
from kiln.core.latency import TokenTiming
from kiln.core.scoring import PositionScore
from kiln.core.turn import ChatTurn, RawPrompt
from kiln.dialects.openai.text_reply import ReadPrompt, TextEncoder
from kiln.dialects.openai.text_request import TextReply, decode_text, to_reply, to_turns
from kiln.dialects.openai.tokens import decode_detokenize, decode_tokenize, to_tokenize_turn
from kiln.dialects.openai.usage import Counting
from kiln.engine.ports import GenerationRequest
from kiln.http.admission import admitted
from kiln.http.body import read_json_body
from kiln.http.routes.openai import counting_of, events_of
from kiln.http.sse import unless_disconnected
from kiln.http.state import ServerState
from kiln.http.streams import stream_events
from kiln.wire import openai_text as wire


@dataclass(frozen=True, slots=True)
class _Plan:
    """What one request will run: an exchange a prompt, and a scoring of it where its tokens are echoed."""

    reply: TextReply
    prepared: list[Prepared]
    scorings: list[GenerationRequest | None]
    texts: list[str]

    @property
    def scored(self) -> int:
        return sum(scoring is not None for scoring in self.scorings)

    @property
    def places(self) -> int:
        """How many sequences of the engine it takes."""
        return self.scored + sum(len(p.requests) for p in self.prepared)


async def completions(request: Request) -> Response:
    state: ServerState = request.app.state.kiln
    entered = time.monotonic()
    body = await read_json_body(request)
    async with admitted(state, request, lambda: decode_text(body), _plan) as (service, plan):
        service.engine.ensure_room(plan.places)
        exchanges = [service.start(p, entered=entered) for p in plan.prepared]
    counting = counting_of(state, service)

    def abandon() -> None:
        for exchange in exchanges:
            exchange.abandon()

    try:
        scores = await unless_disconnected(request.receive, _score(service, plan, entered))
        encoder = _encoder(service, plan, exchanges, scores, counting)
        if plan.reply.stream:
            if plan.scored:
                await service.in_worker(encoder.open)
            events = _merged([events_of(state, e) for e in exchanges], plan.reply.choices)
            return await stream_events(request, events, encoder, abandon)
        ends = await unless_disconnected(request.receive, _collect(exchanges, plan.reply.choices))
    except ClientDisconnect:
        abandon()
        return Response(status_code=499)
    except BaseException:
        abandon()
        raise
    if state.content_filter is not None:
        ends = [await state.content_filter.choice(end) for end in ends]
    content = await service.in_worker(lambda: msgspec.json.encode(encoder.whole(ends)))
    return Response(content, media_type="application/json")


def _plan(request: wire.TextRequest, service: ChatService) -> _Plan:
    reply, model = to_reply(request), service.model
    turns = to_turns(request)
    prepared = [_prepare(service, turn, i, many=len(turns) > 1) for i, turn in enumerate(turns)]
    scorings: list[GenerationRequest | None] = [None] * len(turns)
    if reply.echo and reply.logprobs is not None:
        scorings = [
            prepare_scoring(
                p.prompt_ids,
                reply.logprobs,
                model_id=None,
                add_special=False,
                model=model,
                adapters=p.adapters,
            )
            for p in prepared
        ]
    plan = _Plan(reply, prepared, scorings, _texts(turns, prepared, model))
    service.ensure_possible(plan.places, "prompt" if len(turns) > 1 else "echo")
    return plan


def _texts(turns: Sequence[ChatTurn], prepared: Sequence[Prepared], model: ServedModel) -> list[str]:
    return [
        turn.prompt.content
        if turn.prompt is not None and isinstance(turn.prompt.content, str)
        else text_of(p.prompt_ids, model)
        for turn, p in zip(turns, prepared, strict=True)
    ]


def _prepare(service: ChatService, turn: ChatTurn, index: int, *, many: bool) -> Prepared:
    """Prepare one prompt; a refusal that speaks of `messages` names the prompt instead."""
    try:
        return service.prepare(turn)
    except RequestError as error:
        if error.param is not None and error.param.startswith("messages"):
            error.param = f"prompt[{index}]" if many else "prompt"
        raise


async def _score(service: ChatService, plan: _Plan, entered: float) -> list[tuple[PositionScore, ...] | None]:
    async def one(scoring: GenerationRequest | None) -> tuple[PositionScore, ...] | None:
        return None if scoring is None else await service.score(scoring, entered=entered)

    tasks = [asyncio.ensure_future(one(scoring)) for scoring in plan.scorings]
    try:
        return await asyncio.gather(*tasks)
    finally:
        # Where one fails the others are of no use.
        for task in tasks:
            task.cancel()


def _encoder(
    service: ChatService,
    plan: _Plan,
    exchanges: Sequence[Exchange],
    scores: Sequence[tuple[PositionScore, ...] | None],
    counting: Counting,
) -> TextEncoder:
    prompts = [
        ReadPrompt(exchange.head, prepared.prompt_ids, text, scored)
        for exchange, prepared, text, scored in zip(exchanges, plan.prepared, plan.texts, scores, strict=True)
    ]
    return TextEncoder(
        replace(exchanges[0].head, id=f"cmpl-{uuid.uuid4().hex}"),
        prompts,
        plan.reply,
        counting,
        pieces=service.model.tokenizer.pieces,
        hidden_ids=service.model.hidden_ids,
    )


async def _collect(exchanges: Sequence[Exchange], choices: int) -> list[ChoiceEnd]:
    """Every choice of every prompt, numbered through."""
    completions = await asyncio.gather(*(exchange.collect() for exchange in exchanges))
    return [
        replace(end, index=p * choices + end.index)
        for p, completion in enumerate(completions)
        for end in completion.choices
    ]


Batches = AsyncIterator[list[ExchangeEvent]]


async def _merged(streams: Sequence[Batches], choices: int) -> AsyncIterator[list[ExchangeEvent]]:
    """The events of all prompts as they come, choices numbered through."""
    async with aclosing(interleaved(streams)) as batches:
        async for prompt, batch in batches:
            yield [_numbered(event, prompt * choices) for event in batch]


def _numbered(event: ExchangeEvent, first: int) -> ExchangeEvent:
    if isinstance(event, TokenTiming):
        return event
    if isinstance(event, TextDelta):
        return msgspec.structs.replace(event, index=first + event.index)
    return replace(event, index=first + event.index)


async def tokenize(request: Request) -> Response:
    state: ServerState = request.app.state.kiln
    body = await read_json_body(request)

    def make(wanted: wire.TokenizeRequest, service: ChatService) -> bytes:
        model = service.model
        turn = to_tokenize_turn(wanted)
        ids = tokens_of(turn, model, generation=wanted.add_generation_prompt is not False)
        strings = [text_of((token,), model) for token in ids] if wanted.return_token_strs else None
        return msgspec.json.encode(
            wire.TokenizeResponse(
                count=len(ids),
                max_model_len=model.context_length,
                tokens=list(ids),
                token_strs=msgspec.UNSET if strings is None else strings,
            )
        )

    async with admitted(state, request, lambda: decode_tokenize(body), make) as (_, content):
        return Response(content, media_type="application/json")


async def detokenize(request: Request) -> Response:
    state: ServerState = request.app.state.kiln
    body = await read_json_body(request)

    def make(wanted: wire.DetokenizeRequest, service: ChatService) -> bytes:
        try:
            ids, _ = read_raw(RawPrompt(tuple(wanted.tokens)), service.model)
        except RequestError as error:
            error.param = "tokens"
            raise
        text = text_of(ids, service.model)
        return msgspec.json.encode(wire.DetokenizeResponse(prompt=text))

    async with admitted(state, request, lambda: decode_detokenize(body), make) as (_, content):
        return Response(content, media_type="application/json")
