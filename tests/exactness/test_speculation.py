"""Speculation on the real model: drafts change how many calls an answer takes, and not one bit of it."""

from __future__ import annotations

import asyncio

import pytest

from kiln.backends.llamacpp import LlamaModel, LlamaRunner
from kiln.core.sampling import SamplingParams
from kiln.engine.loop import BatchingEngine
from kiln.engine.ports import AdapterUse, GenerationRequest

from .engines import HOT, Heard, engine_of, generate, make_noise, prompt
from .lora import write_adapter

LUKEWARM = SamplingParams(temperature=0.7, top_k=4, top_p=1.0)
GREEDY = SamplingParams(temperature=0.0)


def repetitive(seed: int, sampling: SamplingParams, uses: tuple[AdapterUse, ...] = ()) -> GenerationRequest:
    """A prompt that says the same thing four times, so that the model is likely to go on with it."""
    ids = 4 * prompt(seed, 10, 30)
    return GenerationRequest(ids, 40, sampling, seed, exact=True, adapters=uses, scope=repr(uses))


def test_the_runner_proves_drafts_exact(model: LlamaModel) -> None:
    runner = LlamaRunner(model, sequences=2, kv_cells=256, threads=2)
    facts = runner.describe()["exactness"]
    runner.close()
    assert facts == {**facts, "proven": True, "with_drafts": True}  # type: ignore[dict-item]


# The smallest cache holds one context: evictions, preemptions and collections all the time.
@pytest.mark.parametrize("kv_cells", [1024, 8192])
async def test_exact_answers_are_the_same_bits(
    model: LlamaModel, kv_cells: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write_adapter(tmp_path_factory.mktemp("adapters") / "cheerful.gguf")
    uses = (AdapterUse(str(path), 1.0),)
    requests = [repetitive(seed, sampling) for seed in range(4) for sampling in (GREEDY, LUKEWARM, HOT)]
    requests += [repetitive(seed, LUKEWARM, uses) for seed in range(3)]

    async def in_turn(engine: BatchingEngine) -> list[Heard]:
        return [await generate(engine, request) for request in requests]

    async with engine_of(model, kv_cells, draft_tokens=0) as engine:
        plain = await in_turn(engine)
    async with engine_of(model, kv_cells, draft_tokens=8) as engine:
        assert await in_turn(engine) == plain
        noise = [asyncio.create_task(make_noise(engine, seed)) for seed in range(3)]
        assert await asyncio.gather(*(generate(engine, request) for request in requests)) == plain
        await asyncio.gather(*noise)
        stats = engine.stats()
    assert stats.drafts_accepted > 100
    assert stats.tokens_drafted > stats.drafts_accepted


async def test_drafts_save_model_calls(model: LlamaModel) -> None:
    calls = {}
    for draft_tokens in (0, 8):
        async with engine_of(model, 2048, draft_tokens=draft_tokens) as engine:
            for seed in range(6):
                await generate(engine, repetitive(seed, GREEDY))
            calls[draft_tokens] = engine.stats().steps
    assert calls[8] < calls[0]
