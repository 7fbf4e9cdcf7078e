"""The event loop's side of an engine: generations by key, the queue's bound, deliveries."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import count

from kiln.core.errors import EngineFailed, KilnError, QueueFull
from kiln.core.tokens import FinishReason
from kiln.core.wording import counted
from kiln.engine.messages import Cancel, CloseThinking, Command, EngineLimits, StepReport, Submit
from kiln.engine.ports import Delivery, EngineStats, GenerationEnd, GenerationRequest, Timings


class EngineFrontend(ABC):
    """What every `Engine` over an `EngineWorker` does on the event loop. All methods run there."""

    def __init__(self, *, context_length: int, limits: EngineLimits, max_queue: int) -> None:
        self.context_length = context_length
        self._limits = limits
        self._max_queue = max_queue
        self._generations: dict[int, BatchGeneration] = {}
        self._keys = count()
        self._stats = EngineStats(0, 0, 0, 0, 0)
        self._facts: Mapping[str, object] = {}

    @property
    @abstractmethod
    def is_alive(self) -> bool: ...

    @abstractmethod
    def tell(self, command: Command) -> None:
        """Send a command to the worker, which reads it between two steps."""

    @property
    def is_restarting(self) -> bool:
        return False

    @property
    def facts(self) -> Mapping[str, object]:
        return self._facts

    def stats(self) -> EngineStats:
        return self._stats

    @property
    def room(self) -> int:
        # Requests that find a free place need not wait, so they do not count against the queue.
        return self._limits.parallel + self._max_queue

    def ensure_room(self, count: int) -> None:
        held = len(self._generations)
        if held + count > self.room:
            raise QueueFull(
                f"{counted(held, 'request')} {'is' if held == 1 else 'are'} running or waiting;"
                f" {self._limits.parallel} may run and {self._max_queue} wait"
            )

    def submit(self, request: GenerationRequest) -> BatchGeneration:
        if not self.is_alive:
            raise EngineFailed("the engine is not running")
        self.ensure_room(1)
        command = Submit(next(self._keys), request, time.monotonic())
        generation = BatchGeneration(self, command)
        self._generations[command.key] = generation
        self.tell(command)
        return generation

    def receive(self, report: StepReport) -> None:
        """Pass a report's deliveries on."""
        self._stats = report.stats
        for key in report.admitted:
            generation = self._generations.get(key)
            if generation is not None and generation.begun is None:
                generation.begun = time.monotonic()
        step = report.step
        for key, delivery in report.deliveries.items():
            delivery.step = step
            if delivery.end is not None:
                generation = self._generations.pop(key, None)
            else:
                generation = self._generations.get(key)
            if generation is not None:
                generation.deliver(delivery)

    def fail(self, generations: Iterable[BatchGeneration], error: KilnError) -> None:
        """End generations with an error, without the worker."""
        for generation in list(generations):
            self.end(generation, FinishReason.ERROR, error)

    def end(self, generation: BatchGeneration, reason: FinishReason, error: KilnError | None) -> None:
        """End a generation here; what the worker still says of it is not heard."""
        self._generations.pop(generation.command.key, None)
        timings = Timings(generation.command.submitted, admitted=generation.begun, ended=time.monotonic())
        generation.deliver(Delivery(end=GenerationEnd(reason, None, timings, error)))


class BatchGeneration:
    """The event loop's end of one sequence. Implements the `Generation` port."""

    def __init__(self, engine: EngineFrontend, command: Submit) -> None:
        self.command = command
        # When the worker took it from the queue; until then it may be submitted again.
        self.begun: float | None = None
        self.close_asked = False
        self._engine = engine
        self._deliveries: deque[Delivery] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False

    def __aiter__(self) -> BatchGeneration:
        return self

    async def __anext__(self) -> Delivery:
        if self._ended and not self._deliveries:
            raise StopAsyncIteration
        if not self._deliveries:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._deliveries.popleft()

    def cancel(self, error: KilnError | None = None) -> None:
        if not self._ended:
            self._engine.tell(Cancel(self.command.key))
            # Not the worker's word is waited for: it may be in a long call, or hang.
            self._engine.end(self, FinishReason.CANCELLED if error is None else FinishReason.ERROR, error)

    def stop(self) -> None:
        if not self._ended:
            self._engine.tell(Cancel(self.command.key))

    def close_thinking(self) -> None:
        if not self._ended:
            self.close_asked = True
            self._engine.tell(CloseThinking(self.command.key))

    def deliver(self, delivery: Delivery) -> None:
        self._ended = delivery.end is not None
        self._deliveries.append(delivery)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
