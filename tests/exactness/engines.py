"""The bundled model behind an engine without a server, and what it is asked."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from kiln.backends.llamacpp import LlamaModel, LlamaRunner
from kiln.core.sampling import SamplingParams
from kiln.engine.loop import BatchingEngine
from kiln.engine.ports import GenerationRequest

HOT = SamplingParams(temperature=3.0, top_k=0, top_p=1.0)
PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0)
Heard = list[tuple[int, float | None]]


@asynccontextmanager
async def engine_of(
    model: LlamaModel, kv_cells: int = 4096, *, adapters: int = 8, **options: Any
) -> AsyncIterator[BatchingEngine]:
    """A started engine that checks its books; `options` are BatchingEngine's."""
    engine = BatchingEngine(
        lambda: LlamaRunner(model, sequences=32, kv_cells=kv_cells, threads=2, adapters=adapters),
        pieces=model.pieces,
        context_length=1024,
        parallel=16,
        checks_books=True,
        **options,
    )
    await engine.start()
    try:
        yield engine
    finally:
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
