"""Exact requests on the real model: the same ids and log-probabilities, bit for bit, in any company."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from kiln.backends.llamacpp import LlamaModel, LlamaRunner
from kiln.cli.assembly import load_model
from kiln.core.sampling import SamplingParams
from kiln.core.settings import Settings
from kiln.engine.loop import BatchingEngine
from kiln.engine.ports import GenerationRequest, ScoreSpec

HOT = SamplingParams(temperature=3.0, top_k=0, top_p=1.0)
PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0)
Heard = list[tuple[int, float | None]]


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return load_model(Settings.default())


@asynccontextmanager
async def engine_of(model: LlamaModel, kv_cells: int) -> AsyncIterator[BatchingEngine]:
    engine = BatchingEngine(
        lambda: LlamaRunner(model, sequences=32, kv_cells=kv_cells, threads=2),
        pieces=model.pieces,
        context_length=1024,
        parallel=16,
        checks_books=True,
    )
    await engine.start()
    yield engine
    await engine.stop()


def prompt(seed: int, low: int, high: int) -> list[int]:
    generator = np.random.default_rng(seed)
    ids: list[int] = generator.integers(10, 700, int(generator.integers(low, high))).tolist()
    return ids


async def generate(engine: BatchingEngine, request: GenerationRequest) -> Heard:
    heard: Heard = []
    async for delivery in engine.submit(request):
        heard += [(token.token_id, token.logprob) for token in delivery.tokens]
        assert delivery.end is None or delivery.end.error is None
    return heard


async def make_noise(engine: BatchingEngine, seed: int) -> None:
    """Ordinary requests of all lengths, some of which are cancelled."""
    rng = random.Random(seed)
    for _ in range(8):
        ids = prompt(rng.randrange(10**9), 5, 300)
        generation = engine.submit(GenerationRequest(ids, rng.randrange(1, 50), PLAIN, rng.randrange(10**9)))
        async for _delivery in generation:
            if rng.random() < 0.03:
                generation.cancel()


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
