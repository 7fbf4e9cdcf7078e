"""The completion cache: a deterministic generation is computed once, also for concurrent requests.

It wraps an engine and looks only at generation requests marked `cacheable`, which the use case sets
for greedy or seeded ones without a time budget, provenance or performance metadata. Such requests are
computed exactly, unless nothing is, so that a hit is what the engine would have said. Several subscribers
of one running generation hear it live; the last that leaves cancels it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace

from msgspec import structs

from kiln.core.errors import KilnError
from kiln.core.tokens import FinishReason, TokenEvent
from kiln.engine.ports import (
    Delivery,
    Engine,
    EngineStats,
    Generation,
    GenerationEnd,
    GenerationRequest,
    StepTimes,
    Timings,
)


class CachingEngine:
    """Implements the `Engine` port over another one. `entries` finished generations are kept, LRU."""

    def __init__(self, engine: Engine, entries: int, *, exact: bool = True) -> None:
        self._engine = engine
        self._exact = exact
        self._entries = entries
        self._finished: OrderedDict[Hashable, tuple[list[TokenEvent], GenerationEnd]] = OrderedDict()
        self._flights: dict[Hashable, _Flight] = {}
        self.counts: Counter[str] = Counter(hit=0, joined=0, miss=0, bypass=0)
        self.context_length = engine.context_length

    @property
    def is_alive(self) -> bool:
        return self._engine.is_alive

    @property
    def is_restarting(self) -> bool:
        return self._engine.is_restarting

    @property
    def facts(self) -> Mapping[str, object]:
        return self._engine.facts

    async def start(self) -> None:
        await self._engine.start()

    async def stop(self) -> None:
        await self._engine.stop()
        await asyncio.gather(*(flight.task for flight in self._flights.values()), return_exceptions=True)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    @property
    def room(self) -> int:
        return self._engine.room

    def ensure_room(self, count: int) -> None:
        self._engine.ensure_room(count)

    def submit(self, request: GenerationRequest) -> Generation:
        if not request.cacheable:
            self.counts["bypass"] += 1
            return self._engine.submit(request)
        key = _key(request)
        found = self._finished.get(key)
        if found is not None:
            self.counts["hit"] += 1
            self._finished.move_to_end(key)
            return _Replay(*found)
        flight = self._flights.get(key)
        if flight is None:
            self.counts["miss"] += 1
            flight = self._take_off(key, request)
        else:
            self.counts["joined"] += 1
        return _Subscription(self, flight)

    def _take_off(self, key: Hashable, request: GenerationRequest) -> _Flight:
        flight = _Flight(key, request, self._engine.submit(replace(request, exact=self._exact)), self._land)
        self._flights[key] = flight
        return flight

    def _land(self, flight: _Flight) -> None:
        """Keep what a flight ended with, unless it was cut or somebody steered it."""
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]
            if flight.end is not None and flight.end.reason in (FinishReason.STOP, FinishReason.LENGTH):
                self._finished[flight.key] = (flight.tokens, flight.end)
                while len(self._finished) > self._entries:
                    self._finished.popitem(last=False)

    def abandon(self, flight: _Flight) -> None:
        """The last subscriber has left: nobody may join what is being cut."""
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]
        flight.generation.cancel()

    def steer(self, flight: _Flight, subscriber: _Subscription) -> None:
        """One subscriber closes the thinking: the flight becomes its own, the others start another."""
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]
        others = [s for s in flight.subscribers if s is not subscriber]
        if others:
            successor = self._flights.get(flight.key) or self._take_off(flight.key, flight.request)
            for other in others:
                other.move_to(successor)
        flight.generation.close_thinking()


class _Flight:
    """A running generation and everything it has said so far."""

    def __init__(
        self,
        key: Hashable,
        request: GenerationRequest,
        generation: Generation,
        land: Callable[[_Flight], None],
    ) -> None:
        self.key = key
        self.request = request
        self.generation = generation
        self.tokens: list[TokenEvent] = []
        self.end: GenerationEnd | None = None
        self.subscribers: list[_Subscription] = []
        self._land = land
        self.task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        async for delivery in self.generation:
            self.tokens.extend(delivery.tokens)
            if delivery.end is not None:
                self.end = delivery.end
                self._land(self)
            for subscriber in self.subscribers:
                subscriber.wake(delivery)


class _Subscription:
    """One request's view of a flight. Implements the `Generation` port.

    Its place counts tokens, so it can go on in another flight that says the same.
    """

    def __init__(self, engine: CachingEngine, flight: _Flight) -> None:
        self._engine = engine
        self._flight = flight
        self._place = 0
        self._ended = False
        self._cut: GenerationEnd | None = None
        self._news = asyncio.Event()
        self._came = time.monotonic()
        # Tokens that were there when it came: they were not made for it.
        self._earlier = len(flight.tokens)
        self._step = StepTimes(handed=self._came)
        flight.subscribers.append(self)

    @property
    def begun(self) -> float | None:
        return self._flight.generation.begun

    def __aiter__(self) -> _Subscription:
        return self

    async def __anext__(self) -> Delivery:
        if self._ended:
            raise StopAsyncIteration
        while True:
            if self._cut is not None:
                return self._finish([], self._cut)
            if self._place < self._earlier:
                return self._catch_up()
            tokens = self._flight.tokens[self._place :]
            if self._flight.end is not None:
                return self._finish(tokens, self._flight.end)
            if tokens:
                self._place += len(tokens)
                return Delivery(tokens=tokens, step=self._step)
            self._news.clear()
            await self._news.wait()

    def _catch_up(self) -> Delivery:
        tokens = self._flight.tokens[self._place : self._earlier]
        self._place = self._earlier
        return _said_again(tokens, self._came)

    def wake(self, delivery: Delivery) -> None:
        self._step = delivery.step
        self._news.set()

    def move_to(self, flight: _Flight) -> None:
        self._leave(cancel=False)
        self._flight = flight
        self._earlier = min(self._earlier, len(flight.tokens))
        flight.subscribers.append(self)

    def cancel(self, error: KilnError | None = None) -> None:
        if not self._ended and self._cut is None:
            self._leave(cancel=True)
            self._cut = _cut_short(error)
            self._news.set()

    def stop(self) -> None:
        self.cancel()

    def close_thinking(self) -> None:
        if not self._ended and self._flight.end is None:
            self._engine.steer(self._flight, self)

    def _finish(self, tokens: list[TokenEvent], end: GenerationEnd) -> Delivery:
        self._ended = True
        self._leave(cancel=False)
        timings = replace(end.timings, submitted=max(self._came, end.timings.submitted))
        return Delivery(tokens=tokens, end=replace(end, timings=timings), step=self._step)

    def _leave(self, *, cancel: bool) -> None:
        if self in self._flight.subscribers:
            self._flight.subscribers.remove(self)
            if cancel and not self._flight.subscribers:
                self._engine.abandon(self._flight)


class _Replay:
    """A finished generation, said at once. Implements the `Generation` port."""

    def __init__(self, tokens: list[TokenEvent], end: GenerationEnd) -> None:
        now = time.monotonic()
        self.begun: float | None = now
        self._delivery: Delivery | None = _said_again(tokens, now)
        self._delivery.end = replace(end, timings=Timings(now, ended=now), cached_tokens=0)

    def __aiter__(self) -> _Replay:
        return self

    async def __anext__(self) -> Delivery:
        delivery, self._delivery = self._delivery, None
        if delivery is None:
            raise StopAsyncIteration
        return delivery

    def cancel(self, error: KilnError | None = None) -> None:
        if self._delivery is not None:
            self._delivery = Delivery(end=_cut_short(error))

    def stop(self) -> None:
        self.cancel()

    def close_thinking(self) -> None:
        pass


def _said_again(tokens: list[TokenEvent], now: float) -> Delivery:
    """Tokens that were made for an earlier request."""
    again = [structs.replace(token, ready_s=now) for token in tokens]
    return Delivery(tokens=again, step=StepTimes(handed=now), replayed=True)


def _cut_short(error: KilnError | None) -> GenerationEnd:
    now = time.monotonic()
    reason = FinishReason.CANCELLED if error is None else FinishReason.ERROR
    return GenerationEnd(reason, None, Timings(now, ended=now), error)


def _key(request: GenerationRequest) -> Hashable:
    """Everything that decides the tokens; the seed only where it is used."""
    thinking = request.thinking
    return (
        tuple(request.prompt_ids),
        request.max_tokens,
        request.sampling,
        (request.seed, request.choice_index) if request.sampling.temperature > 0 else None,
        request.eos_ids,
        None if thinking is None else (thinking.close.ids, thinking.limits),
        request.scope,
        tuple(sorted((request.logit_bias or {}).items())),
        request.top_logprobs,
        request.grammar,
        request.adapters,
    )
