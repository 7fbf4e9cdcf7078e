"""Prefixes that were copied out and back on the real model: the same bits, and hardly any prompt computed."""

from __future__ import annotations

import asyncio

import pytest

from kiln.backends.llamacpp import LlamaModel, LlamaRunner
from kiln.core.errors import EngineFailed
from kiln.engine.loop import BatchingEngine
from kiln.engine.ports import AdapterUse, GenerationRequest

from .engines import HOT, Heard, engine_of, generate, make_noise, prompt
from .lora import write_adapter


def turns(seed: int, uses: tuple[AdapterUse, ...]) -> list[GenerationRequest]:
    """Three turns of a conversation, each of which begins with the one before."""
    ids = prompt(seed, 150, 250)
    lengths = (len(ids), len(ids) + 60, len(ids) + 130)
    ids = ids + prompt(1000 + seed, 200, 201)
    return [
        GenerationRequest(ids[:length], 12, HOT, seed, exact=True, adapters=uses, scope=repr(uses))
        for length in lengths
    ]


async def test_an_idle_engine_reports_an_empty_cache(model: LlamaModel) -> None:
    async with engine_of(model, host_bytes=64 * 2**20) as engine:
        await generate(engine, turns(1, ())[0])
        assert engine.stats().kv_cells_used > 150
        # No request comes: what has been moved to the host's memory is reported all the same.
        async with asyncio.timeout(30):
            while engine.stats().kv_cells_used:
                await asyncio.sleep(0.02)


async def test_what_cannot_be_copied_back_fails_once(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise EngineFailed("refused")

    first, second, _ = turns(1, ())
    async with engine_of(model, host_bytes=64 * 2**20) as engine:
        await generate(engine, first)
        async with asyncio.timeout(30):
            while engine.stats().kv_cells_used:
                await asyncio.sleep(0.02)
        monkeypatch.setattr(LlamaRunner, "restore", refuse)
        ends = [delivery.end async for delivery in engine.submit(second) if delivery.end is not None]
        assert isinstance(ends[0].error, EngineFailed)
        # The next one computes it.
        assert len(await generate(engine, second)) == second.max_tokens


async def test_conversations_go_on_from_the_hosts_memory(
    model: LlamaModel, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write_adapter(tmp_path_factory.mktemp("adapters") / "cheerful.gguf")
    cheerful = (AdapterUse(str(path), 1.0),)
    conversations = [turns(seed, cheerful if seed % 3 == 0 else ()) for seed in range(8)]
    in_order = [request for turn in zip(*conversations, strict=True) for request in turn]

    async def play(engine: BatchingEngine) -> list[Heard]:
        return [await generate(engine, request) for request in in_order]

    async with engine_of(model, draft_tokens=4) as engine:
        plain = await play(engine)
        assert engine.stats().prompt_tokens_cached == 0
    async with engine_of(model, draft_tokens=4, host_bytes=64 * 2**20) as engine:
        assert await play(engine) == plain
        stats = engine.stats()
        # Second and third turns compute what is new: 60 and 70 tokens of each of eight conversations.
        first_turns = sum(len(turn[0].prompt_ids) for turn in conversations)
        assert stats.prompt_tokens_computed == first_turns + 8 * (60 + 70)
        assert stats.prompt_tokens_restored == stats.prompt_tokens_cached > 16 * 150
        # And once more in company, in a cache that is often collected.
        noise = [asyncio.create_task(make_noise(engine, seed)) for seed in range(3)]
        again = await asyncio.gather(*(generate(engine, request) for request in in_order))
        await asyncio.gather(*noise)
        assert again == plain
