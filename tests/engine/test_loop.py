"""The batching engine over a scripted model: streaming, ends, cancellation, failures, KV pressure.

Nothing here waits by the clock: the model waits for the test inside a call, and the test for the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kiln.core.budgets import Outcome, Trigger
from kiln.core.errors import (
    AdapterUnusable,
    EngineFailed,
    ModelLoadError,
    QueueFull,
    RequestTimedOut,
    ShuttingDown,
)
from kiln.core.sampling import SamplingParams
from kiln.core.scoring import PositionScore
from kiln.core.tokens import FinishReason, Source, TokenEvent
from kiln.engine.loop import BatchingEngine
from kiln.engine.ports import (
    AdapterUse,
    Generation,
    GenerationEnd,
    GenerationRequest,
    ScoreSpec,
    ThinkingSpec,
)
from kiln.engine.runner import KVExhausted
from kiln.thinking.gate import CloseSequence, GateLimits

from .scripted import FAILSAFE_S, HashRunner, Hold, Script, ScriptedRunner

GREEDY = SamplingParams(temperature=0.0)
EOS = 2
CLOSE = CloseSequence.of((60, 61, 62), b"</think>")
PIECES = [bytes([65 + i]) for i in range(60)] + [b"</", b"think", b">", b"?"]


def script(name: int, *, prompt: int = 3, says: Sequence[int] | int = 8) -> Script:
    """A prompt of `prompt` tokens that no other script shares, and what the model says to it."""
    words = tuple(range(20, 20 + says)) if isinstance(says, int) else tuple(says)
    return Script((name, *[name] * (prompt - 1)), words)


def ask(
    script: Script, max_tokens: int | None = None, *, gate: GateLimits | None = None, **rest: Any
) -> GenerationRequest:
    rest.setdefault("eos_ids", frozenset({EOS}))
    return GenerationRequest(
        prompt_ids=script.prompt,
        max_tokens=len(script.says) if max_tokens is None else max_tokens,
        sampling=rest.pop("sampling", GREEDY),
        seed=rest.pop("seed", 0),
        thinking=None if gate is None else ThinkingSpec(CLOSE, gate),
        **rest,
    )


@contextlib.asynccontextmanager
async def serving(runner: ScriptedRunner, **options: Any) -> AsyncIterator[BatchingEngine]:
    """A started engine over `runner`; held calls are let go and the engine is stopped at the end."""
    engine = BatchingEngine(
        lambda: runner,
        pieces=PIECES,
        context_length=runner.kv_cells,
        parallel=options.pop("parallel", runner.sequences),
        checks_books=True,
        **options,
    )
    await engine.start()
    try:
        yield engine
    finally:
        runner.release_all()
        await engine.stop()


@dataclass
class Heard:
    """Everything a generation delivered."""

    tokens: list[TokenEvent] = field(default_factory=list)
    scores: list[PositionScore] = field(default_factory=list)
    end: GenerationEnd | None = None

    @property
    def ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def reason(self) -> FinishReason:
        assert self.end is not None
        return self.end.reason

    @property
    def outcome(self) -> Outcome:
        assert self.end is not None and self.end.outcome is not None
        return self.end.outcome


async def hear(generation: Generation) -> Heard:
    heard = Heard()
    async with asyncio.timeout(FAILSAFE_S):
        async for delivery in generation:
            assert heard.end is None, "a delivery after the end"
            heard.tokens += delivery.tokens
            heard.scores += delivery.scores
            heard.end = delivery.end
    assert heard.end is not None
    return heard


async def hear_all(*generations: Generation) -> list[Heard]:
    return list(await asyncio.gather(*map(hear, generations)))


async def reached(hold: Hold) -> None:
    """Wait until the engine is inside the held call."""
    assert await asyncio.to_thread(hold.entered.wait, FAILSAFE_S)


# Streaming.


async def test_tokens_stream_in_order_and_the_last_delivery_carries_the_end() -> None:
    s = script(3)
    async with serving(ScriptedRunner([s])) as engine:
        deliveries = [d async for d in engine.submit(ask(s))]
    assert [[t.token_id for t in d.tokens] for d in deliveries] == [[t] for t in s.says]
    assert [d.end is not None for d in deliveries] == [False] * 7 + [True]
    tokens = [t for d in deliveries for t in d.tokens]
    assert all(t.source is Source.SAMPLED and t.logprob == 0.0 for t in tokens)
    assert [t.ready_s for t in tokens] == sorted(t.ready_s for t in tokens)
    end = deliveries[-1].end
    assert end is not None and end.reason is FinishReason.LENGTH
    assert end.error is None and end.outcome is None
    marks = [end.timings.submitted, end.timings.admitted, end.timings.first_token, end.timings.ended]
    assert None not in marks
    assert marks == sorted(m for m in marks if m is not None)


async def test_many_stream_at_once() -> None:
    scripts = [script(n, prompt=n, says=[n + 20, *range(20, 20 + n)]) for n in range(3, 15)]
    async with serving(ScriptedRunner(scripts, sequences=4), step_tokens=5) as engine:
        heard = await hear_all(*(engine.submit(ask(s)) for s in scripts))
    assert [h.ids for h in heard] == [list(s.says) for s in scripts]


async def test_a_generation_can_be_read_late() -> None:
    s = script(3)
    async with serving(ScriptedRunner([s])) as engine:
        generation = engine.submit(ask(s))
        other = await hear(engine.submit(ask(s)))
        assert (await hear(generation)).ids == other.ids == list(s.says)
        with pytest.raises(StopAsyncIteration):
            await generation.__anext__()


async def test_end_of_sequence() -> None:
    s = script(3, says=[20, EOS, 21, 22])
    async with serving(ScriptedRunner([s])) as engine:
        stopped, went_on = await hear_all(engine.submit(ask(s)), engine.submit(ask(s, eos_ids=frozenset())))
    assert (stopped.ids, stopped.reason) == ([20, EOS], FinishReason.STOP)
    assert (went_on.ids, went_on.reason) == ([20, EOS, 21, 22], FinishReason.LENGTH)


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
async def test_max_tokens(max_tokens: int) -> None:
    s = script(3)
    runner = ScriptedRunner([s])
    async with serving(runner) as engine:
        heard = await hear(engine.submit(ask(s, max_tokens)))
    assert (heard.ids, heard.reason) == (list(s.says[:max_tokens]), FinishReason.LENGTH)
    assert len(runner.calls) == max_tokens


async def test_the_sampled_log_probability_is_reported() -> None:
    s = script(3, says=[20])
    plain = SamplingParams(temperature=1.0, top_p=1.0, top_k=0)
    async with serving(HashRunner([s])) as engine:
        one, two = await hear_all(
            engine.submit(ask(s, sampling=plain, seed=4)), engine.submit(ask(s, sampling=plain, seed=4))
        )
    assert [t.logprob for t in one.tokens] == [t.logprob for t in two.tokens]
    assert all(t.logprob is not None and t.logprob < 0.0 for t in one.tokens)


async def test_draws_do_not_depend_on_who_else_runs() -> None:
    scripts = [script(n, prompt=n) for n in range(3, 9)]
    hot = SamplingParams(temperature=1.0, top_p=0.95, top_k=20, repetition_penalty=1.1)

    def request(s: Script) -> GenerationRequest:
        return ask(s, 12, sampling=hot, seed=7, eos_ids=frozenset())

    async with serving(HashRunner(scripts, sequences=8)) as engine:
        alone = [(await hear(engine.submit(request(s)))).ids for s in scripts]
    async with serving(HashRunner(scripts, sequences=8), step_tokens=7) as engine:
        together = [h.ids for h in await hear_all(*(engine.submit(request(s)) for s in scripts))]
    assert together == alone


async def test_one_hand_over_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = [script(n) for n in range(3, 7)]
    loop = asyncio.get_running_loop()
    schedule, hand_overs = loop.call_soon_threadsafe, []

    def counted(*args: Any, **kwargs: Any) -> asyncio.Handle:
        if threading.current_thread().name == "kiln-engine":
            hand_overs.append(args[0])
        return schedule(*args, **kwargs)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    runner = ScriptedRunner(scripts)
    hold = runner.hold_at(0)
    async with serving(runner) as engine:
        first = engine.submit(ask(scripts[0]))
        await reached(hold)
        others = [engine.submit(ask(s)) for s in scripts[1:]]
        hold.release()
        heard = await hear_all(first, *others)
        steps = engine.stats().steps
        # The start, the four requests' arrivals, and then one a step however many sequences run.
        assert len(hand_overs) <= 1 + 4 + steps
        assert sum(len(h.tokens) for h in heard) == 32 > 2 * steps


async def test_stats_and_facts() -> None:
    s, t = script(3, prompt=4), script(4)
    runner = ScriptedRunner([s, t], sequences=2, kv_cells=99)
    hold = runner.hold_at(3)
    async with serving(runner, parallel=1) as engine:
        one, two = engine.submit(ask(s)), engine.submit(ask(t))
        await reached(hold)
        await one.__anext__()
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.kv_cells) == (1, 1, 99)
        assert stats.kv_cells_used >= 4
        hold.release()
        await hear_all(one, two)
        stats = engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.steps == 16
        assert stats.prompt_tokens_computed == 7
        assert engine.facts == {"backend": "scripted", "isolation": "inline"}


async def test_everything_of_the_runner_happens_on_one_thread() -> None:
    s = script(3)
    runners = []

    def make() -> ScriptedRunner:
        runners.append(ScriptedRunner([s]))
        return runners[0]

    engine = BatchingEngine(make, pieces=PIECES, context_length=64, parallel=2)
    await engine.start()
    await hear(engine.submit(ask(s)))
    await engine.stop()
    (runner,) = runners
    assert runner.closed
    assert len(runner.threads) == 1 and threading.get_ident() not in runner.threads


# Thinking.


async def test_a_budget_is_enforced_and_labelled() -> None:
    s = script(3, says=[20, 21, 22, 23, 24, 25, 26, 27])
    async with serving(ScriptedRunner([s])) as engine:
        heard = await hear(engine.submit(ask(s, gate=GateLimits(2, None, 8))))
    # The answer goes on with what the model says at that position.
    assert heard.ids == [20, 21, 60, 61, 62, 25, 26, 27]
    labels = [(t.source is Source.FORCED, t.logprob is None) for t in heard.tokens]
    assert labels == [(False, False)] * 2 + [(True, True)] * 3 + [(False, False)] * 3
    assert (heard.outcome.trigger, heard.outcome.closed) == (Trigger.TOKENS, True)
    assert heard.outcome.thinking_tokens == 2


async def test_forced_tokens_enter_the_cache() -> None:
    s = script(3, says=8)
    runner = ScriptedRunner([s])
    async with serving(runner) as engine:
        await hear(engine.submit(ask(s, gate=GateLimits(0, None, 8))))
    decoded = [chunk.tokens[0] for call in runner.calls[1:] for chunk in call.chunks]
    assert decoded == [60, 61, 62, *s.says[3:7]]


async def test_a_forced_end_of_sequence_id_does_not_end() -> None:
    s = script(3, says=8)
    async with serving(ScriptedRunner([s])) as engine:
        heard = await hear(engine.submit(ask(s, gate=GateLimits(0, None, 8), eos_ids=frozenset({61}))))
    assert heard.ids == [60, 61, 62, *s.says[3:]]


async def test_each_generation_has_exactly_one_outcome() -> None:
    closes = script(3, says=[20, 60, 61, 62, 21, EOS])
    thinks = script(4, says=[20, 21, 22, 23, 24, EOS])
    ends = script(5, says=[20, EOS, 21, 21, 21, 21])
    async with serving(ScriptedRunner([closes, thinks, ends])) as engine:
        natural, reserved, unclosed = await hear_all(
            engine.submit(ask(closes, gate=GateLimits(1, None, 6))),
            engine.submit(ask(thinks, 5, gate=GateLimits(9, None, 5))),
            engine.submit(ask(ends, gate=GateLimits(9, None, 6))),
        )
    assert (natural.outcome.trigger, natural.outcome.closed) == (None, True)
    assert natural.reason is FinishReason.STOP
    assert (reserved.outcome.trigger, reserved.outcome.closed) == (Trigger.MAX_TOKENS, True)
    assert reserved.ids == [20, 21, 60, 61, 62]
    assert (unclosed.outcome.trigger, unclosed.outcome.closed) == (None, False)
    assert unclosed.reason is FinishReason.STOP


async def test_close_thinking_acts_at_the_next_token() -> None:
    s = script(3, says=[20] * 40)
    runner = ScriptedRunner([s])
    hold = runner.hold_at(5)
    async with serving(runner) as engine:
        generation = engine.submit(ask(s, gate=GateLimits()))
        await reached(hold)
        generation.close_thinking()
        hold.release()
        heard = await hear(generation)
    # Five tokens were there, and what the held call gives is already the first forced one.
    assert heard.ids == [20] * 5 + [60, 61, 62] + [20] * 32
    assert [t.source is Source.FORCED for t in heard.tokens] == [False] * 5 + [True] * 3 + [False] * 32
    assert heard.outcome.interrupted and heard.outcome.closed and heard.outcome.trigger is None
    assert heard.outcome.thinking_tokens == 5


async def test_close_thinking_while_waiting_and_without_a_gate() -> None:
    first, waits, plain = script(3), script(4, says=[20] * 6), script(5)
    runner = ScriptedRunner([first, waits, plain], sequences=2)
    hold = runner.hold_at(0)
    async with serving(runner, parallel=1) as engine:
        generations = [
            engine.submit(ask(first)),
            engine.submit(ask(waits, gate=GateLimits())),
            engine.submit(ask(plain)),
        ]
        await reached(hold)
        for generation in generations:
            generation.close_thinking()
        hold.release()
        heard = await hear_all(*generations)
        for generation in generations:
            generation.close_thinking()  # over: no effect
    assert heard[0].ids == list(first.says)
    assert heard[1].ids == [60, 61, 62, 20, 20, 20]
    assert heard[2].ids == list(plain.says)


# Cancelling.


async def test_cancel_while_waiting() -> None:
    runs, waits, later = script(3), script(4), script(5)
    runner = ScriptedRunner([runs, waits, later], sequences=2)
    hold = runner.hold_at(0)
    async with serving(runner, parallel=1) as engine:
        running, waiting = engine.submit(ask(runs)), engine.submit(ask(waits))
        await reached(hold)
        waiting.cancel()
        behind = engine.submit(ask(later))
        hold.release()
        cancelled = await hear(waiting)
        assert (cancelled.ids, cancelled.reason) == ([], FinishReason.CANCELLED)
        assert [h.reason for h in await hear_all(running, behind)] == [FinishReason.LENGTH] * 2
    assert runner.calls_of(waits) == []


async def test_cancel_while_prefilling_frees_the_slot_within_one_step() -> None:
    long, later = script(3, prompt=40), script(4)
    runner = ScriptedRunner([long, later], sequences=2)
    hold = runner.hold_at(1)
    async with serving(runner, parallel=1, step_tokens=8) as engine:
        generation, behind = engine.submit(ask(long)), engine.submit(ask(later))
        await reached(hold)
        generation.cancel()
        generation.cancel()
        hold.release()
        cancelled, served = await hear_all(generation, behind)
    assert (cancelled.ids, cancelled.reason) == ([], FinishReason.CANCELLED)
    assert served.ids == list(later.says)
    assert runner.calls_of(long) == [0, 1]
    assert runner.calls_of(later)[0] == 2


async def test_cancel_while_decoding_frees_the_slot_within_one_step() -> None:
    endless, later = script(3, says=[20] * 50), script(4)
    runner = ScriptedRunner([endless, later], sequences=2)
    hold = runner.hold_at(4)
    async with serving(runner, parallel=1) as engine:
        generation, behind = engine.submit(ask(endless)), engine.submit(ask(later))
        await reached(hold)
        generation.cancel()
        hold.release()
        cancelled, served = await hear_all(generation, behind)
    assert cancelled.reason is FinishReason.CANCELLED
    # It ends at once for the reader, who does not hear of the call under way.
    assert cancelled.ids == [20] * 4
    assert served.ids == list(later.says)
    assert runner.calls_of(endless) == [0, 1, 2, 3, 4]
    assert runner.calls_of(later)[0] == 5


async def test_cancel_with_an_error_ends_with_it() -> None:
    s = script(3, says=[20] * 50)
    runner = ScriptedRunner([s])
    hold = runner.hold_at(2)
    error = RequestTimedOut("too long")
    async with serving(runner) as engine:
        generation = engine.submit(ask(s, gate=GateLimits(max_tokens=40)))
        await reached(hold)
        generation.cancel(error)
        hold.release()
        heard = await hear(generation)
    assert heard.end is not None
    assert (heard.end.reason, heard.end.error) == (FinishReason.ERROR, error)


async def test_cancel_ends_for_the_reader_although_the_model_hangs() -> None:
    s = script(3, says=[20] * 50)
    runner = ScriptedRunner([s])
    hold = runner.hold_at(2)
    async with serving(runner) as engine:
        generation = engine.submit(ask(s))
        await reached(hold)
        generation.cancel(RequestTimedOut("too long"))
        heard = await hear(generation)
        assert heard.reason is FinishReason.ERROR
        hold.release()


async def test_stop_ends_within_one_step_with_the_account() -> None:
    s = script(3, says=[20] * 50)
    runner = ScriptedRunner([s])
    hold = runner.hold_at(2)
    async with serving(runner) as engine:
        generation = engine.submit(ask(s, gate=GateLimits(max_tokens=40)))
        await reached(hold)
        generation.stop()
        hold.release()
        heard = await hear(generation)
    assert heard.reason is FinishReason.CANCELLED
    assert heard.outcome == Outcome(None, False, 3, heard.outcome.thinking_time_ms)


async def test_cancel_after_the_end_does_nothing() -> None:
    s = script(3)
    async with serving(ScriptedRunner([s])) as engine:
        generation = engine.submit(ask(s))
        await hear(generation)
        generation.cancel(ShuttingDown("late"))
        assert (await hear(engine.submit(ask(s)))).ids == list(s.says)


# The queue's bound.


async def test_a_full_queue_refuses() -> None:
    scripts = [script(n) for n in range(3, 7)]
    runner = ScriptedRunner(scripts, sequences=2)
    hold = runner.hold_at(1)
    async with serving(runner, parallel=1, max_queue=2) as engine:
        runs = engine.submit(ask(scripts[0]))
        await reached(hold)
        await runs.__anext__()  # its admission is known here now
        engine.ensure_room(2)
        with pytest.raises(QueueFull, match="^1 request is running or waiting; 1 may run and 2 wait"):
            engine.ensure_room(3)
        waits = [engine.submit(ask(s)) for s in scripts[1:3]]
        with pytest.raises(QueueFull, match="^3 requests are running or waiting"):
            engine.submit(ask(scripts[3]))
        hold.release()
        heard = await hear_all(runs, *waits)
        assert [h.reason for h in heard] == [FinishReason.LENGTH] * 3
        engine.ensure_room(2)
        assert (await hear(engine.submit(ask(scripts[3])))).ids == list(scripts[3].says)


async def test_a_cancelled_request_leaves_the_queue() -> None:
    scripts = [script(n) for n in range(3, 6)]
    runner = ScriptedRunner(scripts, sequences=2)
    hold = runner.hold_at(1)
    async with serving(runner, parallel=1, max_queue=1) as engine:
        runs = engine.submit(ask(scripts[0]))
        await reached(hold)
        await runs.__anext__()
        waits = engine.submit(ask(scripts[1]))
        waits.cancel()
        hold.release()
        await hear(waits)
        assert (await hear(engine.submit(ask(scripts[2])))).ids == list(scripts[2].says)
        await hear(runs)


async def test_free_slots_are_not_a_queue() -> None:
    # Nothing has to wait: two slots are free, so a queue bound of 0 has nothing to refuse.
    s = script(3)
    async with serving(ScriptedRunner([s]), parallel=2, max_queue=0) as engine:
        heard = await hear_all(engine.submit(ask(s)), engine.submit(ask(s)))
    assert [h.ids for h in heard] == [list(s.says)] * 2


# Failures.


async def test_a_failed_step_ends_what_was_there_and_later_requests_succeed() -> None:
    # Long enough that their KV would be kept as prefixes, had the step not failed.
    runs, waits = script(3, prompt=20), script(4, prompt=20)
    runner = ScriptedRunner([runs, waits], sequences=2)
    error = EngineFailed("llama_decode returned -3")
    runner.fail_at(3, error)
    hold = runner.hold_at(2)
    async with serving(runner, parallel=1) as engine:
        generations = [engine.submit(ask(runs)), engine.submit(ask(waits))]
        await reached(hold)
        hold.release()
        heard = await hear_all(*generations)
        assert [(h.reason, h.end and h.end.error) for h in heard] == [(FinishReason.ERROR, error)] * 2
        assert heard[0].ids == list(runs.says[:3])
        assert engine.is_alive
        assert not runner.kv
        again = await hear_all(engine.submit(ask(runs)), engine.submit(ask(waits)))
        assert [h.ids for h in again] == [list(runs.says), list(waits.says)]


async def test_an_unexpected_failure_ends_everything_and_nothing_hangs() -> None:
    runs, waits = script(3), script(4)
    runner = ScriptedRunner([runs, waits], sequences=2)
    runner.fail_at(3, ZeroDivisionError("a bug"))
    hold = runner.hold_at(2)
    async with serving(runner, parallel=1) as engine:
        generations = [engine.submit(ask(runs)), engine.submit(ask(waits))]
        await reached(hold)
        hold.release()
        heard = await hear_all(*generations)
        assert [h.reason for h in heard] == [FinishReason.ERROR] * 2
        assert all(h.end is not None and isinstance(h.end.error, EngineFailed) for h in heard)
        assert not engine.is_alive
        with pytest.raises(EngineFailed):
            engine.submit(ask(runs))
        generations[0].cancel()
    assert runner.closed


async def test_a_request_that_comes_while_the_engine_dies_ends_too() -> None:
    s = script(3)
    runner = ScriptedRunner([s])
    runner.fail_at(1, ZeroDivisionError("a bug"))
    hold = runner.hold_at(0)
    async with serving(runner) as engine:
        first = engine.submit(ask(s))
        await reached(hold)
        hold.release()
        # The thread is dead before the event loop can hear of it.
        assert engine._thread is not None
        engine._thread.join(FAILSAFE_S)
        late = engine.submit(ask(s))
        for heard in await hear_all(first, late):
            assert heard.end is not None and isinstance(heard.end.error, EngineFailed)


async def test_start_raises_what_the_making_of_the_runner_raised() -> None:
    def make() -> ScriptedRunner:
        raise ModelLoadError("no such file")

    engine = BatchingEngine(make, pieces=PIECES, context_length=64, parallel=1)
    with pytest.raises(ModelLoadError, match="no such file"):
        await engine.start()
    assert not engine.is_alive
    with pytest.raises(EngineFailed):
        engine.submit(ask(script(3)))
    await engine.stop()


# Stopping.


async def test_stop_ends_everything_as_cancelled() -> None:
    runs, waits = script(3, says=[20] * 50), script(4)
    runner = ScriptedRunner([runs, waits], sequences=2)
    hold = runner.hold_at(3)
    stopped: list[bool] = []
    async with serving(runner, parallel=1, on_stopped=lambda: stopped.append(runner.closed)) as engine:
        generations = [engine.submit(ask(runs)), engine.submit(ask(waits))]
        await reached(hold)
        stopping = asyncio.create_task(engine.stop())
        # The engine may go on once it has been told to stop, not before.
        await asyncio.sleep(0)
        hold.release()
        heard = await hear_all(*generations)
        await stopping
        assert [h.reason for h in heard] == [FinishReason.CANCELLED] * 2
        assert all(h.end is not None and h.end.error is None for h in heard)
        assert stopped == [True]
        assert not engine.is_alive
        with pytest.raises(EngineFailed):
            engine.submit(ask(runs))


async def test_stop_before_start_and_twice() -> None:
    engine = BatchingEngine(ScriptedRunner, pieces=PIECES, context_length=64, parallel=1)
    await engine.stop()
    with pytest.raises(EngineFailed):
        engine.submit(ask(script(3)))
    await engine.start()
    await engine.stop()
    await engine.stop()


async def test_a_request_that_comes_during_stop_ends() -> None:
    s = script(3)
    runner = ScriptedRunner([s])
    hold = runner.hold_at(0)
    async with serving(runner) as engine:
        engine.submit(ask(s))
        await reached(hold)
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
        try:
            late = engine.submit(ask(s))
        except EngineFailed:
            late = None
        hold.release()
        await stopping
        if late is not None:
            assert (await hear(late)).reason in (FinishReason.CANCELLED, FinishReason.ERROR)


# KV pressure.


async def test_preemption_gives_the_same_tokens() -> None:
    scripts = [script(n, prompt=2 * n) for n in range(3, 9)]
    hot = SamplingParams(temperature=1.0, top_p=0.9, top_k=30, presence_penalty=0.5)

    async def run(kv_cells: int) -> tuple[list[list[int]], int]:
        runner = HashRunner(scripts, sequences=5, kv_cells=kv_cells)
        async with serving(runner, parallel=4, step_tokens=8) as engine:
            heard = await hear_all(
                *(
                    engine.submit(ask(s, 20, sampling=hot, seed=n, gate=GateLimits(9, None, 20)))
                    for n, s in enumerate(scripts)
                )
            )
            assert all(h.reason in (FinishReason.LENGTH, FinishReason.STOP) for h in heard)
            assert runner.most_cells <= kv_cells
            return [h.ids for h in heard], engine.stats().preemptions

    roomy, none = await run(1024)
    tight, some = await run(48)
    assert tight == roomy
    assert none == 0 < some


@pytest.mark.parametrize("index", range(1, 12))
async def test_one_refused_call_changes_nothing(index: int) -> None:
    # Decode calls, prefill calls, and steps that have both.
    scripts = [script(n, prompt=4 * n) for n in range(3, 7)]

    async def run(refused: int | None) -> list[list[int]]:
        runner = HashRunner(scripts, sequences=6)
        hold = runner.hold_at(0)
        if refused is not None:
            runner.fail_at(refused, KVExhausted())
        async with serving(runner, parallel=4, step_tokens=10, stall_tokens=10) as engine:
            generations = [engine.submit(ask(s, 9, eos_ids=frozenset())) for s in scripts[:1]]
            await reached(hold)
            generations += [engine.submit(ask(s, 9, eos_ids=frozenset())) for s in scripts[1:]]
            hold.release()
            heard = await hear_all(*generations)
            assert engine.is_alive
            return [h.ids for h in heard]

    assert await run(index) == await run(None)


async def test_a_request_that_the_cache_cannot_hold_alone_ends_with_an_error() -> None:
    s, t = script(3), script(4, says=2)
    async with serving(ScriptedRunner([s, t], cells=6)) as engine:
        heard = await hear(engine.submit(ask(s)))
        assert heard.reason is FinishReason.ERROR
        assert heard.end is not None and isinstance(heard.end.error, EngineFailed)
        # Three of the cells were the prompt's; the fourth token was picked before it needed one.
        assert heard.ids == list(s.says[:4])
        assert (await hear(engine.submit(ask(t)))).ids == list(t.says)


async def test_a_refused_exact_call_leaves_no_gap() -> None:
    other, s = script(4, prompt=20, says=1), script(3, prompt=100, says=3)
    runner = ScriptedRunner([other, s], sequences=4, max_rows=512)
    async with serving(runner, parallel=2, step_tokens=512) as engine:
        await hear(engine.submit(ask(other)))  # leaves a prefix that can be given up
        runner.fail_at(1, KVExhausted())
        heard = await hear(engine.submit(ask(s, exact=True)))
    assert heard.ids == list(s.says)


async def test_a_fuller_cache_than_the_books_say_does_not_stop_progress() -> None:
    # What the books count on and what the cache holds differ for good, not once.
    scripts = [script(n, prompt=2 * n) for n in range(3, 9)]

    async def run(cells: int) -> list[list[int]]:
        runner = HashRunner(scripts, sequences=5, kv_cells=128, cells=cells)
        async with serving(runner, parallel=4, step_tokens=8) as engine:
            heard = await hear_all(*(engine.submit(ask(s, 20, eos_ids=frozenset())) for s in scripts))
            assert all(h.reason is FinishReason.LENGTH for h in heard)
            return [h.ids for h in heard]

    assert await run(40) == await run(128)


# Shared prefixes.


async def test_a_shared_prefix_is_computed_once_and_changes_no_token() -> None:
    base = tuple(range(3, 43))
    prompts = [Script((*base, n), (20,)) for n in range(50, 54)]

    async def run(can_share: bool) -> tuple[list[list[int]], list[int], int]:
        runner = HashRunner(sequences=8, can_share=can_share)
        async with serving(runner, parallel=4, step_tokens=16) as engine:
            first = await hear(engine.submit(ask(prompts[0], 6, eos_ids=frozenset())))
            rest = await hear_all(*(engine.submit(ask(p, 6, eos_ids=frozenset())) for p in prompts[1:]))
            heard = [first, *rest]
            cached = [h.end.cached_tokens for h in heard if h.end is not None]
            return [h.ids for h in heard], cached, engine.stats().prompt_tokens_computed

    shared, cached, computed = await run(True)
    apart, not_cached, all_computed = await run(False)
    assert shared == apart
    assert cached == [0, 40, 40, 40] and not_cached == [0] * 4
    assert (computed, all_computed) == (41 + 3, 4 * 41)


# Adapters.


async def test_an_adapter_that_cannot_be_loaded_fails_only_its_requests() -> None:
    base, good, bad, also_bad = (script(n, says=20) for n in (3, 4, 5, 6))
    runner = ScriptedRunner([base, good, bad, also_bad], sequences=8)
    runner.broken_adapters = {"bad"}
    uses = [(), (AdapterUse("good", 1.0),), (AdapterUse("bad", 1.0),), (AdapterUse("bad", 0.5),)]
    async with serving(runner, parallel=4) as engine:
        heard = await hear_all(
            *(
                engine.submit(ask(s, adapters=use))
                for s, use in zip((base, good, bad, also_bad), uses, strict=True)
            )
        )
        assert [h.ids for h in heard] == [list(base.says), list(good.says), [], []]
        for h in heard[2:]:
            assert h.end is not None and isinstance(h.end.error, AdapterUnusable)
            assert "it is broken" in h.end.error.message
        # Whether it can be loaded is asked again the next time.
        runner.broken_adapters = set()
        assert (await hear(engine.submit(ask(bad, adapters=uses[2])))).ids == list(bad.says)
        assert engine.stats().adapter_switches > 0


async def test_the_form_of_a_set_of_adapters_does_not_matter() -> None:
    one, two = script(3, says=30), script(4, says=30)
    runner = ScriptedRunner([one, two], sequences=4)
    hold = runner.hold_at(0)
    a, b = AdapterUse("a", 1.0), AdapterUse("b", 0.25)
    async with serving(runner, parallel=2) as engine:
        first = engine.submit(ask(one, adapters=(a, b, b)))
        await reached(hold)
        second = engine.submit(ask(two, adapters=(AdapterUse("b", 0.5), AdapterUse("c", 0.0), a)))
        hold.release()
        await hear_all(first, second)
        assert engine.stats().adapter_switches == 1
    assert {call.adapters for call in runner.calls} == {(a, AdapterUse("b", 0.5))}
    assert max(len(call.chunks) for call in runner.calls) == 2


# Speculation.


REPETITIVE = Script((3, *[20, 21, 22, 23, 24, 25] * 3), tuple([20, 21, 22, 23, 24, 25] * 5))


async def test_drafts_save_calls_and_change_no_token() -> None:
    async def run(draft_tokens: int, **rest: Any) -> tuple[list[TokenEvent], int, tuple[int, int]]:
        runner = ScriptedRunner([REPETITIVE], kv_cells=256)
        async with serving(runner, parallel=2, draft_tokens=draft_tokens) as engine:
            heard = await hear(engine.submit(ask(REPETITIVE, **rest)))
            stats = engine.stats()
        return heard.tokens, len(runner.calls), (stats.tokens_drafted, stats.drafts_accepted)

    plain, calls, _ = await run(0)
    drafted, fewer, (count, accepted) = await run(8)
    assert [t.token_id for t in drafted] == [t.token_id for t in plain] == list(REPETITIVE.says)
    assert (calls, fewer) == (30, 6)
    assert count == accepted == 24


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 8, 29])
async def test_drafts_stop_at_max_tokens(max_tokens: int) -> None:
    async with serving(ScriptedRunner([REPETITIVE]), draft_tokens=8) as engine:
        heard = await hear(engine.submit(ask(REPETITIVE, max_tokens)))
    assert (heard.ids, heard.reason) == (list(REPETITIVE.says[:max_tokens]), FinishReason.LENGTH)


async def test_an_end_of_sequence_within_a_draft_ends() -> None:
    # The prompt holds the end token in its middle, so it is drafted.
    ends = Script((3, *[20, 21, 22, EOS, 24, 25] * 3), (20, 21, 22, EOS, 24, 25))
    runner = ScriptedRunner([ends])
    async with serving(runner, parallel=2, draft_tokens=8) as engine:
        heard = await hear(engine.submit(ask(ends)))
        assert (heard.ids, heard.reason) == ([20, 21, 22, EOS], FinishReason.STOP)
        assert max(call.rows for call in runner.calls[1:]) > 1
        # Its KV is kept as a prefix, without what was computed behind the end.
        assert [token for _, token in runner.kv[0]] == [*ends.prompt, *heard.ids[:-1]][: len(runner.kv[0])]
        follows = Script((*ends.prompt, 20, 21, 22, 30), (40, 41))
        runner.scripts = {3: follows}
        again = await hear(engine.submit(ask(follows)))
    assert again.ids == [40, 41]
    assert again.end is not None and again.end.cached_tokens >= len(ends.prompt)


@pytest.mark.parametrize("seed", range(8))
async def test_drafts_change_no_draw_and_no_label(seed: int) -> None:
    s = Script((3, *[3, 4, 5, 6, 7, 8] * 3), ())
    gate = GateLimits(12, None, 40)
    options: dict[str, Any] = {
        "eos_ids": frozenset(),
        "gate": gate,
        "seed": seed,
        "sampling": SamplingParams(temperature=1.0, top_k=2, top_p=1.0),
        "top_logprobs": 1,
    }

    class Rambling(ScriptedRunner):
        def _answer(self, held: Sequence[int]) -> NDArray[np.float32]:
            # Mostly one up in a ring of six, sometimes elsewhere: drafts are often right and often wrong.
            logits = np.zeros(self.n_vocab, np.float32)
            logits[3 + (held[-1] - 2) % 6] = 2.0 if held[-1] % 2 else 6.0
            logits[3 + (held[-1] + 1) % 6] = 1.0
            return logits

    async def run(draft_tokens: int) -> tuple[list[tuple[Any, ...]], Outcome, int]:
        async with serving(Rambling([s], kv_cells=512), parallel=2, draft_tokens=draft_tokens) as engine:
            heard = await hear(engine.submit(ask(s, 40, **options)))
            tokens = [(t.token_id, t.source, t.logprob, t.score) for t in heard.tokens]
            return tokens, replace(heard.outcome, thinking_time_ms=0), engine.stats().tokens_drafted

    plain, outcome, none = await run(0)
    drafted, same_outcome, some = await run(6)
    assert drafted == plain
    assert same_outcome == outcome
    assert outcome.trigger is Trigger.TOKENS and outcome.thinking_tokens == 12
    assert (none, some > 0) == (0, True)


# Scoring.


async def test_prompt_scores_come_in_order_and_once() -> None:
    s = script(3, prompt=30)
    async with serving(HashRunner([s]), step_tokens=8) as engine:
        heard = await hear(engine.submit(ask(s, 1, scores=ScoreSpec(top_k=2))))
    assert heard.reason is FinishReason.LENGTH and heard.ids == []
    assert [p.token_id for p in heard.scores] == list(s.prompt[1:])
    assert all(len(p.top) == 2 and p.logprob < 0 for p in heard.scores)


async def test_scores_come_once_after_a_preemption() -> None:
    # The older one grows into the cells of the scored prompt, which is computed three tokens a step.
    decodes, scored = script(3, says=[20] * 30), script(4, prompt=30)
    runner = HashRunner([decodes, scored], kv_cells=40)
    hold = runner.hold_at(0)
    async with serving(runner, parallel=2, stall_tokens=3) as engine:
        one = engine.submit(ask(decodes, eos_ids=frozenset()))
        await reached(hold)
        two = engine.submit(ask(scored, 1, scores=ScoreSpec(top_k=0)))
        hold.release()
        _, heard = await hear_all(one, two)
        assert engine.stats().preemptions == 1
    assert [p.token_id for p in heard.scores] == list(scored.prompt[1:])
