"""The completion cache over a scripted engine: hits, joining, steering, cancelling, what is never kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from kiln.core.tokens import FinishReason, Source
from kiln.engine.cache import CachingEngine
from kiln.engine.loop import BatchingEngine
from kiln.engine.ports import Generation, GenerationEnd, GenerationRequest, ThinkingSpec
from kiln.thinking.gate import CloseSequence, GateLimits

from .scripted import ScriptedRunner
from .test_loop import PIECES, ask, reached, script

LONG = [20, 21, 22, 23, 24, 25, 26, 27]


@asynccontextmanager
async def caching(runner: ScriptedRunner, entries: int = 4) -> AsyncIterator[CachingEngine]:
    inner = BatchingEngine(lambda: runner, pieces=PIECES, context_length=512, parallel=3)
    engine = CachingEngine(inner, entries)
    await engine.start()
    try:
        yield engine
    finally:
        runner.release_all()
        await engine.stop()


async def run(generation: Generation) -> tuple[list[int], GenerationEnd]:
    ids: list[int] = []
    async for delivery in generation:
        ids += [token.token_id for token in delivery.tokens]
        if delivery.end is not None:
            return ids, delivery.end
    raise AssertionError("no end")


def request_of(prompt: int = 3) -> tuple[ScriptedRunner, GenerationRequest]:
    s = script(prompt, says=LONG)
    return ScriptedRunner([s]), replace(ask(s), cacheable=True)


async def test_a_second_request_is_a_hit_and_says_the_same() -> None:
    runner, request = request_of()
    async with caching(runner) as engine:
        first = await run(engine.submit(request))
        calls = len(runner.calls)
        second = await run(engine.submit(request))
        assert second[0] == first[0] == LONG
        assert second[1].reason is first[1].reason
        assert len(runner.calls) == calls
        assert engine.counts == {"hit": 1, "joined": 0, "miss": 1, "bypass": 0}


async def test_what_decides_the_tokens_is_in_the_key() -> None:
    runner, request = request_of()
    async with caching(runner) as engine:
        await run(engine.submit(request))
        for other in (
            replace(request, max_tokens=3),
            replace(request, eos_ids=frozenset({63})),
            replace(request, sampling=replace(request.sampling, temperature=1e-6), seed=1),
        ):
            await run(engine.submit(other))
        # The seed of a greedy request decides nothing.
        await run(engine.submit(replace(request, seed=99)))
        assert engine.counts["miss"] == 4
        assert engine.counts["hit"] == 1


async def test_requests_that_are_not_cacheable_pass_by() -> None:
    runner, request = request_of()
    async with caching(runner) as engine:
        for _ in range(2):
            await run(engine.submit(replace(request, cacheable=False)))
        assert engine.counts == {"hit": 0, "joined": 0, "miss": 0, "bypass": 2}


async def test_concurrent_requests_share_one_generation() -> None:
    runner, request = request_of()
    hold = runner.hold_at(3)
    async with caching(runner) as engine:
        one = asyncio.create_task(run(engine.submit(request)))
        await reached(hold)
        two = asyncio.create_task(run(engine.submit(request)))
        hold.release()
        assert (await one)[0] == (await two)[0] == LONG
        assert engine.counts["joined"] == 1


async def test_one_who_joins_late_hears_of_no_time_before_it_came() -> None:
    runner, request = request_of()
    hold = runner.hold_at(4)
    async with caching(runner) as engine:
        leader = engine.submit(request)
        await reached(hold)
        early = await anext(leader)
        came = time.monotonic()
        late = engine.submit(request)
        first = await anext(late)
        hold.release()
        _, (rest, end) = await asyncio.gather(run(leader), run(late))
    assert first.replayed and not early.replayed
    assert first.tokens[0].token_id == early.tokens[0].token_id
    assert min(token.ready_s for token in first.tokens) >= came and first.step.handed >= came
    assert [token.token_id for token in first.tokens] + rest == LONG
    assert end.timings.submitted >= came


async def test_the_leader_may_leave() -> None:
    runner, request = request_of()
    hold = runner.hold_at(3)
    async with caching(runner) as engine:
        leader = engine.submit(request)
        await reached(hold)
        follower = asyncio.create_task(run(engine.submit(request)))
        await asyncio.sleep(0)
        leader.cancel()
        hold.release()
        assert (await run(leader))[1].reason is FinishReason.CANCELLED
        assert (await follower)[0] == LONG


async def test_a_generation_that_everybody_left_is_cut_and_not_kept() -> None:
    runner, request = request_of()
    hold = runner.hold_at(2)
    async with caching(runner) as engine:
        only = engine.submit(request)
        await reached(hold)
        only.cancel()
        hold.release()
        await run(only)
        while engine.stats().running:
            await asyncio.sleep(0.001)
        assert (await run(engine.submit(request)))[0] == LONG
        assert engine.counts["miss"] == 2


async def test_the_oldest_entry_goes_first() -> None:
    scripts = [script(n, says=[20 + n]) for n in range(3, 7)]
    runner = ScriptedRunner(scripts)
    async with caching(runner, entries=2) as engine:
        requests = [replace(ask(s), cacheable=True) for s in scripts]
        for request in requests[:3]:
            await run(engine.submit(request))
        await run(engine.submit(requests[2]))
        await run(engine.submit(requests[1]))
        await run(engine.submit(requests[0]))
        assert engine.counts["hit"] == 2
        assert engine.counts["miss"] == 4


async def test_skipping_steers_only_the_one_who_asked() -> None:
    runner, request = request_of()
    thinking = ThinkingSpec(CloseSequence.of([40], b"</think>"), GateLimits())
    request = replace(request, thinking=thinking)
    hold = runner.hold_at(3)
    async with caching(runner) as engine:
        skipper = engine.submit(request)
        await reached(hold)
        other = asyncio.create_task(run(engine.submit(request)))
        await asyncio.sleep(0)
        skipper.close_thinking()
        hold.release()
        ids = []
        sources = []
        async for delivery in skipper:
            ids += [token.token_id for token in delivery.tokens]
            sources += [token.source for token in delivery.tokens]
        assert ids[sources.index(Source.FORCED)] == 40
        assert (await other)[0] == LONG
        # What was steered is not what the request says.
        assert (await run(engine.submit(request)))[0] == LONG
