"""The batching engine: one thread that owns the runner and turns steps, and the event loop's side of it.

Invariant of the loop: `schedule` decides, `begin` and `apply` write; nothing else touches scheduler
state. Commands from the event loop are read between steps only. All events of a step cross to the
event loop in one hand-over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import count

import numpy as np
from numpy.typing import NDArray

from kiln.core.errors import EngineFailed, InternalError, KilnError, QueueFull
from kiln.core.tokens import FinishReason, Source, TokenEvent
from kiln.engine.ports import (
    Chunk,
    Delivery,
    EngineStats,
    GenerationEnd,
    GenerationRequest,
    KVExhausted,
    ModelRunner,
    ScoreSpec,
    StepTimes,
    Timings,
)
from kiln.engine.scheduler import Limits, Pick, PlannedCall, Scheduler, Step
from kiln.engine.scoring import score_position
from kiln.engine.sequence import Sequence
from kiln.thinking.gate import ThinkingGate

log = logging.getLogger(__name__)


class BatchGeneration:
    """The event loop's end of one sequence. Implements the `Generation` port."""

    def __init__(self, engine: BatchingEngine, key: int) -> None:
        self._engine = engine
        self._key = key
        self._deliveries: deque[Delivery] = deque()
        self._ready = asyncio.Event()
        self._ended = False

    def __aiter__(self) -> BatchGeneration:
        return self

    async def __anext__(self) -> Delivery:
        if self._ended and not self._deliveries:
            raise StopAsyncIteration
        while not self._deliveries:
            self._ready.clear()
            await self._ready.wait()
        return self._deliveries.popleft()

    def cancel(self, error: KilnError | None = None) -> None:
        if not self._ended:
            self._engine.command(lambda worker: worker.cancel(self._key, error))

    def close_thinking(self) -> None:
        if not self._ended:
            self._engine.command(lambda worker: worker.close_thinking(self._key))

    def deliver(self, delivery: Delivery) -> None:
        self._ended = delivery.end is not None
        self._deliveries.append(delivery)
        self._ready.set()


Command = Callable[["_Worker"], None]


class BatchingEngine:
    """Implements the `Engine` port over a `ModelRunner`.

    At most `parallel` sequences run at once; the runner's other sequences retain prefixes. A step
    computes at most `step_tokens` prompt tokens, `stall_tokens` while others decode.
    `make_runner` is called on the engine thread, which owns the runner until `stop`. `pieces[i]`
    are the bytes of token i, for the thinking gate. `on_stopped` runs after the runner is closed.
    """

    def __init__(
        self,
        make_runner: Callable[[], ModelRunner],
        *,
        pieces: SequenceOf[bytes],
        context_length: int,
        parallel: int,
        step_tokens: int = 512,
        stall_tokens: int = 128,
        max_queue: int = 256,
        on_stopped: Callable[[], None] = lambda: None,
    ) -> None:
        self.context_length = context_length
        self._make_runner = make_runner
        self._pieces = pieces
        self._parallel = parallel
        self._step_tokens = step_tokens
        self._stall_tokens = stall_tokens
        self._facts: Mapping[str, object] = {}
        self._max_queue = max_queue
        self._on_stopped = on_stopped
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._generations: dict[int, BatchGeneration] = {}
        self._keys = count()
        self._stats = EngineStats(0, 0, 0, 0, 0)
        self._thread: threading.Thread | None = None
        self._failed: KilnError | None = None

    @property
    def is_alive(self) -> bool:
        return self._failed is None and self._thread is not None

    @property
    def facts(self) -> Mapping[str, object]:
        return self._facts

    def _limits(self, runner: ModelRunner) -> Limits:
        return Limits(
            running=self._parallel,
            slots=runner.sequences,
            kv_cells=runner.kv_cells,
            step_tokens=self._step_tokens,
            stall_tokens=self._stall_tokens,
            max_rows=runner.max_rows,
            can_share=runner.can_share,
        )

    async def start(self) -> None:
        """Start the engine thread and wait until the runner is ready. Raises what its making raised."""
        loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = loop.create_future()

        def hand_over(function: Callable[..., None], *args: object) -> None:
            # The loop may be gone when a test or a crash tears the server down first.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(function, *args)

        def run() -> None:
            try:
                runner = self._make_runner()
            except BaseException as error:
                hand_over(started.set_exception, error)
                return
            try:
                self._facts = runner.describe()
                limits = self._limits(runner)
                worker = _Worker(runner, self._pieces, limits, lambda *a: hand_over(self._deliver, *a))
                hand_over(started.set_result, None)
                worker.run(self._commands)
            except BaseException:
                log.exception("the engine thread ended")
                hand_over(self._fail_all)
            finally:
                runner.close()

        thread = threading.Thread(target=run, name="kiln-engine", daemon=True)
        thread.start()
        await started
        self._thread = thread

    def ensure_room(self, count: int) -> None:
        # Requests that find a free place need not wait, so they do not count against the queue.
        if len(self._generations) + count > self._parallel + self._max_queue:
            raise QueueFull(
                f"{len(self._generations)} requests are running or waiting;"
                f" {self._parallel} may run and {self._max_queue} wait"
            )

    def submit(self, request: GenerationRequest) -> BatchGeneration:
        if self._failed is not None or self._thread is None:
            raise EngineFailed("the engine is not running")
        self.ensure_room(1)
        key = next(self._keys)
        generation = BatchGeneration(self, key)
        self._generations[key] = generation
        submitted = time.monotonic()
        self.command(lambda worker: worker.add(key, request, submitted))
        return generation

    def command(self, command: Command) -> None:
        """Have the engine thread run `command` between two steps."""
        self._commands.put(command)

    def stats(self) -> EngineStats:
        return self._stats

    async def stop(self) -> None:
        """End the thread; running sequences end as CANCELLED. Native memory is free when this returns."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._commands.put(None)
            await asyncio.to_thread(thread.join)
            self._on_stopped()

    def _deliver(self, outbox: dict[int, Delivery], stats: EngineStats) -> None:
        self._stats = stats
        for key, delivery in outbox.items():
            if delivery.end is not None:
                generation = self._generations.pop(key, None)
            else:
                generation = self._generations.get(key)
            if generation is not None:
                generation.deliver(delivery)

    def _fail_all(self) -> None:
        self._failed = EngineFailed("the engine stopped unexpectedly")
        now = time.monotonic()
        for generation in self._generations.values():
            end = GenerationEnd(FinishReason.ERROR, None, Timings(now, ended=now), self._failed)
            generation.deliver(Delivery(end=end))
        self._generations.clear()


Publish = Callable[[dict[int, Delivery], EngineStats], None]


class _Worker:
    """Everything that lives on the engine thread."""

    def __init__(self, runner: ModelRunner, pieces: SequenceOf[bytes], limits: Limits, publish: Publish):
        self._runner = runner
        self._pieces = pieces
        self._publish = publish
        self._scheduler = Scheduler(limits)
        self._sequences: dict[int, Sequence] = {}
        self._outbox: dict[int, Delivery] = {}
        self._times = StepTimes()
        self._refused = False
        self._steps = self._computed = self._cached = self._preemptions = 0

    def run(self, commands: queue.SimpleQueue[Command | None]) -> None:
        """Turn steps until a None command arrives; sleep on the queue while idle."""
        while True:
            while self._scheduler.is_idle or not commands.empty():
                command = commands.get()
                if command is None:
                    self._end_all(FinishReason.CANCELLED)
                    self._flush()
                    return
                command(self)
                self._flush()
            try:
                self._step()
            except KilnError as error:
                log.error("engine step failed: %s", error.message)
                self._end_all(FinishReason.ERROR, error)
                # What the native side holds after a failed call is unknown.
                self._drop(self._scheduler.forget_all())
            self._flush()

    # Commands, run between steps.

    def add(self, key: int, request: GenerationRequest, submitted: float) -> None:
        gate = None
        if request.thinking is not None:
            gate = ThinkingGate(request.thinking.close, request.thinking.limits, self._pieces)
        sequence = Sequence(key, request, gate, submitted)
        self._sequences[key] = sequence
        self._scheduler.add(sequence)

    def cancel(self, key: int, error: KilnError | None) -> None:
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._end(sequence, FinishReason.CANCELLED if error is None else FinishReason.ERROR, error)

    def close_thinking(self, key: int) -> None:
        sequence = self._sequences.get(key)
        if sequence is not None and sequence.gate is not None:
            sequence.gate.skip()

    # One step.

    def _step(self) -> None:
        step = self._scheduler.schedule()
        self._begin(step)
        if step.stuck is not None:
            self._end_too_large(step.stuck)
        calls = [(planned, True) for planned in step.decode] + [(planned, False) for planned in step.prefill]
        for planned, is_decode in calls:
            if not self._call(planned, is_decode=is_decode):
                break  # a later call of the step may build on this one
        self._steps += 1

    def _begin(self, step: Step) -> None:
        dropped, copies = self._scheduler.begin(step, time.monotonic())
        self._drop(dropped)
        for copy in copies:
            self._runner.copy(copy.source, copy.target, copy.length)
        self._preemptions += len(step.preempted)
        for admission in step.admitted:
            self._cached += admission.shared

    def _call(self, planned: PlannedCall, *, is_decode: bool) -> bool:
        """Run a call and pick from its logits. False if the cache refused it and nothing was computed."""
        started = time.monotonic()
        try:
            logits = self._runner.execute(planned.call)
        except KVExhausted:
            log.warning("the KV cache refused %d rows that the books had room for", planned.call.rows)
            self._drop(self._scheduler.forget_all())
            if self._refused:
                self._scheduler.learn_exhausted(planned.call)
            self._refused = True
            return False
        self._refused = False
        now = time.monotonic()
        self._scheduler.apply(planned)
        self._note_time(planned.rows, now - started, is_decode=is_decode)
        row = 0
        for sequence, chunk in zip(planned.rows, planned.call.chunks, strict=True):
            rows = logits[row : row + chunk.outputs]
            row += chunk.outputs
            if sequence.generated == 0:
                self._computed += len(chunk.tokens)
            if sequence.request.scores is not None:
                self._score(sequence, chunk, rows, sequence.request.scores)
            elif chunk.outputs:
                self._pick(sequence, rows[0], now)
        self._times.sampling_s += time.monotonic() - now
        return True

    def _note_time(self, rows: SequenceOf[Sequence], seconds: float, *, is_decode: bool) -> None:
        if is_decode:
            self._times.decode_s += seconds
            for sequence in rows:
                sequence.decode_s += seconds
        else:
            self._times.prefill_s += seconds
            for sequence in set(rows):
                sequence.prefill_s += seconds

    def _pick(self, sequence: Sequence, logits: NDArray[np.float32], now: float) -> None:
        try:
            pick = _choose(sequence, logits, now)
        except Exception:
            # A fault in one request's sampling must not cost the others anything.
            log.exception("sampling failed")
            failure = InternalError("sampling failed for this request")
            self._end(sequence, FinishReason.ERROR, failure)
            return
        sequence.sampling_s += time.monotonic() - now
        self._post(sequence).tokens.append(TokenEvent(pick.token, pick.source, pick.logprob, now))
        reason = self._scheduler.accept(sequence, pick, now)
        if reason is not None:
            self._end(sequence, reason)

    def _score(self, sequence: Sequence, chunk: Chunk, rows: NDArray[np.float32], spec: ScoreSpec) -> None:
        scores = self._post(sequence).scores
        for offset, logits in enumerate(rows):
            following = chunk.start + offset + 1
            # After a preemption the prompt is computed again, but each position is reported once.
            if sequence.scored < following < len(sequence.tokens):
                sequence.scored = following
                scores.append(score_position(logits, sequence.tokens[following], spec.top_k))
        if sequence.computed == len(sequence.tokens):
            self._end(sequence, FinishReason.LENGTH)

    def _end(self, sequence: Sequence, reason: FinishReason, error: KilnError | None = None) -> None:
        self._drop(self._scheduler.finish(sequence))
        del self._sequences[sequence.key]
        self._post(sequence).end = sequence.end(reason, time.monotonic(), error)

    def _end_too_large(self, sequence: Sequence) -> None:
        self._end(sequence, FinishReason.ERROR, EngineFailed("the KV cache cannot hold the request"))

    def _end_all(self, reason: FinishReason, error: KilnError | None = None) -> None:
        for sequence in list(self._sequences.values()):
            self._end(sequence, reason, error)

    def _drop(self, slots: SequenceOf[int]) -> None:
        for slot in slots:
            self._runner.drop(slot)

    def _post(self, sequence: Sequence) -> Delivery:
        delivery = self._outbox.get(sequence.key)
        if delivery is None:
            delivery = self._outbox[sequence.key] = Delivery(step=self._times)
        return delivery

    def _flush(self) -> None:
        """Hand everything that happened to the event loop at once."""
        scheduler = self._scheduler
        stats = EngineStats(
            running=len(scheduler.running),
            waiting=scheduler.waiting,
            kv_cells_used=scheduler.ledger.cells - scheduler.ledger.free,
            kv_cells=scheduler.ledger.cells,
            steps=self._steps,
            prompt_tokens_computed=self._computed,
            prompt_tokens_cached=self._cached,
            preemptions=self._preemptions,
        )
        self._times.handed = time.monotonic()
        self._publish(self._outbox, stats)
        self._outbox, self._times = {}, StepTimes()


def _choose(sequence: Sequence, logits: NDArray[np.float32], now: float) -> Pick:
    """Sample, and let the thinking gate replace what was sampled."""
    gate = sequence.gate
    if gate is None or gate.is_done:
        token, logprob = sequence.sampler.pick(logits)
        return Pick(token, Source.SAMPLED, logprob)
    if gate.next_forced is not None:
        token, source = gate.accept(gate.next_forced, now)
        return Pick(token, source, None)
    sampled, logprob = sequence.sampler.pick(logits)
    token, source = gate.accept(sampled, now)
    return Pick(token, source, logprob if source is Source.SAMPLED else None)
