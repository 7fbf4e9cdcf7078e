"""Exact requests on the real model: the same ids and log-probabilities, bit for bit, in any company."""

from __future__ import annotations

import asyncio

import pytest

from kiln.backends.llamacpp import LlamaModel
from kiln.engine.ports import GenerationRequest, ScoreSpec

from .engines import HOT, PLAIN, engine_of, generate, make_noise, prompt


# The smallest cache holds one context: evictions, preemptions and collections all the time.
@pytest.mark.parametrize("kv_cells", [1024, 2048, 16384])
async def test_alone_in_company_cold_and_warm(model: LlamaModel, kv_cells: int) -> None:
    requests = [GenerationRequest(prompt(i, 20, 180), 32, HOT, seed=i, exact=True) for i in range(8)]
    async with engine_of(model, kv_cells) as engine:
        alone = [await generate(engine, request) for request in requests]
        assert len({tuple(heard) for heard in alone}) == len(alone)
        noise = [asyncio.create_task(make_noise(engine, seed)) for seed in range(5)]
        for _ in range(2):
            together = await asyncio.gather(*(generate(engine, request) for request in requests))
            assert together == alone
        await asyncio.gather(*noise)


async def test_scoring_gives_what_decoding_had(model: LlamaModel) -> None:
    request = GenerationRequest(prompt(99, 90, 91), 48, PLAIN, seed=5, exact=True)
    async with engine_of(model, 4096) as engine:
        noise = [asyncio.create_task(make_noise(engine, seed)) for seed in range(4)]
        heard = await generate(engine, request)
        ids = [*request.prompt_ids, *(token for token, _ in heard)]
        scores = []
        async for delivery in engine.submit(
            GenerationRequest(ids, 1, PLAIN, seed=0, exact=True, scores=ScoreSpec(0))
        ):
            scores += delivery.scores
        await asyncio.gather(*noise)
    assert len(scores) == len(ids) - 1
    for score, (token, logprob) in zip(scores[len(request.prompt_ids) - 1 :], heard, strict=True):
        assert score.token_id == token
        assert logprob is not None and abs(score.logprob - logprob) < 1e-6
