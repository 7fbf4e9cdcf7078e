"""The chat use case: prepare a turn, submit it, assemble what comes back, account for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import TypeVar, cast

from kiln.adapters.registry import AdaptersNotReady
from kiln.chat.assemble import ChoiceAssembler, RawEvent
from kiln.chat.interleave import interleaved
from kiln.chat.prepare import Prepared, budget_of, prepare
from kiln.chat.served import ServedModel
from kiln.chat.telemetry.latency import LatencyLedger
from kiln.chat.telemetry.observe import ChoiceReport, Observer
from kiln.chat.workers import Workers
from kiln.core.access import current_owner
from kiln.core.completion import ChoiceEnd, Completion, ExchangeEvent, ExchangeHead
from kiln.core.errors import InvalidAdapter, InvalidField, KilnError, RequestTimedOut, ShuttingDown
from kiln.core.scoring import PositionScore
from kiln.core.tokens import FinishReason
from kiln.core.turn import ChatTurn
from kiln.engine.ports import Engine, Generation, GenerationEnd, GenerationRequest, Timings

T = TypeVar("T")

log = logging.getLogger(__name__)

_ADAPTER_ATTEMPTS = 5


class Exchange:
    """One running exchange: a prompt and its choices."""

    def __init__(
        self,
        head: ExchangeHead,
        prepared: Prepared,
        model: ServedModel,
        generations: list[Generation],
        observer: Observer,
        on_end: Callable[[str], None],
        entered: float,
    ) -> None:
        self.head = head
        # Whose exchange it is: nobody else may act on it.
        self.owner = current_owner()
        self.request_id = prepared.turn.request_id
        self.can_skip = not prepared.turn.provenance
        self._generations = generations
        self._ledgers = [
            LatencyLedger(entered, prepared.seconds, observer.token_gaps, measured=prepared.turn.measured)
            for _ in range(prepared.turn.n)
        ]
        self._assemblers = [
            ChoiceAssembler(i, prepared, model, ledger) for i, ledger in enumerate(self._ledgers)
        ]
        self._observer = observer
        self._on_end = on_end
        self._submitted = time.monotonic()
        self._accounted: set[int] = set()
        self.timer: asyncio.TimerHandle | None = None

    def events(self) -> AsyncGenerator[list[ExchangeEvent]]:
        """Events as they come, one list of one choice and engine step at a time.

        Raises the KilnError that a choice failed with.
        """
        # One generator less for most streams: this is the path of every token.
        return self._choice_events(0, streamed=True) if len(self._assemblers) == 1 else self._interleaved()

    async def _interleaved(self) -> AsyncGenerator[list[ExchangeEvent]]:
        """The events of all choices as they come."""
        streams = [self._choice_events(i, streamed=True) for i in range(len(self._assemblers))]
        async with contextlib.aclosing(interleaved(streams)) as batches:
            async for index, batch in batches:
                yield batch
                self._ledgers[index].enqueued()

    async def collect(self) -> Completion:
        """Run to the end. Raises the KilnError that a choice failed with."""
        try:
            choices = await asyncio.gather(*(self._run(i) for i in range(len(self._assemblers))))
        except BaseException:
            self.abandon()
            raise
        return Completion(self.head, tuple(choices))

    async def collect_each(self) -> list[ChoiceEnd | None]:
        """Run to the end; a choice that fails is None and does not disturb the others."""

        async def one(index: int) -> ChoiceEnd | None:
            try:
                return await self._run(index)
            except KilnError as error:
                log.warning("choice %d of %s failed: %s", index, self.head.id, error.message)
                return None

        return await asyncio.gather(*(one(i) for i in range(len(self._assemblers))))

    async def _run(self, index: int) -> ChoiceEnd:
        last: ExchangeEvent | None = None
        async for batch in self._choice_events(index, streamed=False):
            last = batch[-1] if batch else last
        assert isinstance(last, ChoiceEnd)
        return last

    def skip_thinking(self) -> None:
        """Close the reasoning at the next token; no effect once the answer began."""
        for generation in self._generations:
            generation.close_thinking()

    def stop_choice(self, index: int) -> None:
        """End one choice where it is, as a stop string would."""
        self._assemblers[index].stop()
        if self._generations:
            self._generations[index].stop()

    def fail(self, error: KilnError) -> None:
        """End the exchange with an error, for example at shutdown."""
        for generation in self._generations:
            generation.cancel(error)

    def late(self, seconds: float) -> RequestTimedOut:
        """The error for an exchange whose `seconds` are over: had it a place, and how long did it wait?"""
        return _late(seconds, self._submitted, self._generations)

    def abandon(self) -> None:
        """Nobody reads any more: free everything within one step. Idempotent."""
        for generation in self._generations:
            generation.cancel()
        for index in range(len(self._assemblers)):
            if index not in self._accounted:
                self._account_cut(index, "cancelled")
        self._on_end(self.head.id)

    async def _choice_events(self, index: int, *, streamed: bool) -> AsyncGenerator[list[ExchangeEvent]]:
        assembler = self._assemblers[index]
        if not self._generations:
            now = time.monotonic()
            end = GenerationEnd(FinishReason.LENGTH, None, Timings(now, ended=now))
            yield await self._finish(index, end, streamed=streamed)
            return
        generation = self._generations[index]
        async for delivery in generation:
            if assembler.stopped and delivery.end is None:
                continue
            raw = assembler.feed(delivery)
            events = await _read(assembler, raw) if assembler.has_unread else cast(list[ExchangeEvent], raw)
            if assembler.stopped and delivery.end is None:
                generation.stop()
            if delivery.end is not None:
                events.extend(await self._finish(index, delivery.end, streamed=streamed))
            if events:
                yield events
                if streamed:
                    self._ledgers[index].enqueued()

    async def _finish(self, index: int, end: GenerationEnd, *, streamed: bool) -> list[ExchangeEvent]:
        assembler = self._assemblers[index]
        cut = end.reason in (FinishReason.ERROR, FinishReason.CANCELLED) and not assembler.stopped
        if cut:
            error = end.error if end.error is not None else ShuttingDown("the engine was stopped")
            self._account_cut(index, "error", error, end)
            raise error
        events = await _read(assembler, assembler.flush(end))
        last = assembler.end(end, streamed=streamed)
        events.append(last)
        assert last.latency is not None
        self._account(
            index,
            ChoiceReport(
                index=index,
                reason=str(last.finish_reason),
                error_code=None,
                outcome=end.outcome,
                completion_tokens=last.completion_tokens,
                cached_tokens=end.cached_tokens,
                latency=last.latency,
            ),
        )
        return events

    def _account_cut(
        self, index: int, reason: str, error: KilnError | None = None, end: GenerationEnd | None = None
    ) -> None:
        """Account for what a choice came to until it was cut; the engine may have said its part."""
        ledger = self._ledgers[index]
        if end is not None and end.timings.received is not None:
            latency = ledger.reckon(end.timings, streamed=False)
        else:
            begun = self._generations[index].begun if self._generations else self._submitted
            latency = ledger.reckon_cut(self._submitted, begun)
        self._account(
            index,
            ChoiceReport(
                index=index,
                reason=reason,
                error_code=None if error is None else error.code,
                outcome=None if end is None else end.outcome,
                completion_tokens=self._assemblers[index].tokens,
                cached_tokens=0 if end is None else end.cached_tokens,
                latency=latency,
            ),
        )

    def _account(self, index: int, report: ChoiceReport) -> None:
        if index not in self._accounted:
            self._accounted.add(index)
            self._ledgers[index].tell()
            if len(self._accounted) == len(self._assemblers):
                self._on_end(self.head.id)
            self._observer.choice_ended(self.head, report)


async def _read(assembler: ChoiceAssembler, events: list[RawEvent]) -> list[ExchangeEvent]:
    """The events with their tool calls parsed and checked, off the event loop where there are some."""
    if assembler.has_unread:
        return await asyncio.to_thread(assembler.read_calls, events)
    return cast(list[ExchangeEvent], events)


def _late(seconds: float, submitted: float, generations: Sequence[Generation]) -> RequestTimedOut:
    now = time.monotonic()
    waits = [(now if g.begun is None else g.begun) - submitted for g in generations]
    has_begun = not generations or any(g.begun is not None for g in generations)
    return RequestTimedOut.after(seconds, waited_s=max(waits, default=0.0), has_begun=has_begun)


class ChatService:
    """Owns the served model, the engine and the running exchanges. Lives on the event loop."""

    def __init__(
        self,
        model: ServedModel,
        engine: Engine,
        observer: Observer,
        *,
        request_timeout_s: float | None = None,
    ) -> None:
        self.model = model
        self.engine = engine
        self._observer = observer
        self._request_timeout_s = request_timeout_s
        self._exchanges: dict[str, Exchange] = {}
        # Exchanges of several rounds, and how to end each.
        self._joined: dict[object, Callable[[KilnError], None]] = {}
        self._draining = False
        self._hurried = False
        self._cut = False
        self._workers = Workers()
        self._workers.soon(model.grammars.start)
        self._scoring = 0

    @property
    def is_draining(self) -> bool:
        return self._draining

    @property
    def is_idle(self) -> bool:
        """Whether no exchange, scoring or preparation is under way."""
        return not (self._exchanges or self._joined or self._scoring) and self._workers.waiting == 0

    async def in_worker(self, function: Callable[[], T]) -> T:
        """Run computing work off the event loop. Raises QueueFull when too much of it waits.

        Work that finds an adapter to be read is done again afterwards: reading may take long, and
        nobody else's preparation should wait for it.
        """
        for _ in range(_ADAPTER_ATTEMPTS):
            try:
                return await self._workers.run(function)
            except AdaptersNotReady as waiting:
                with self._workers.busy():
                    await asyncio.to_thread(waiting.load)
        raise InvalidAdapter("the adapter's files change faster than they can be read", param="adapter")

    def prepare(self, turn: ChatTurn) -> Prepared:
        """Synchronous; call it through `in_worker`."""
        try:
            prepared = prepare(turn, self.model)
            self.ensure_possible(len(prepared.requests), "n")
            return prepared
        except KilnError as error:
            self._observer.turn_refused(budget_of(turn, self.model), error)
            raise

    def ensure_possible(self, count: int, param: str) -> None:
        """Raise InvalidField for more generations than there will ever be places for; `param` is to blame.

        Any thread may ask. Whether there are places now says the engine's `ensure_room`.
        """
        if count > self.engine.room:
            raise InvalidField(
                f"the request needs {count} places at once, but no more than {self.engine.room} may run and"
                " wait here",
                param=param,
                hint="Split it into several requests, or raise engine.max_queue or engine.parallel.",
            )

    @contextlib.contextmanager
    def joined(self, fail: Callable[[KilnError], None]) -> Iterator[None]:
        """Exchanges that are rounds of one belong in here: a drain waits for the last of them.

        `fail` ends what goes on in here, also between two of them. Raises ShuttingDown.
        """
        if self._draining:
            raise ShuttingDown("the server is shutting down")
        key = object()
        self._joined[key] = fail
        try:
            yield
        finally:
            del self._joined[key]

    def start(self, prepared: Prepared, *, entered: float, joined: bool = False) -> Exchange:
        """Submit a prepared turn that entered at `entered` (`time.monotonic()`). One of those that are
        `joined` may begin while the server drains.

        Raises QueueFull, ShuttingDown or EngineFailed.
        """
        if self._cut or (self._draining and not joined):
            raise ShuttingDown("the server is shutting down")
        self.engine.ensure_room(len(prepared.requests))
        head = ExchangeHead(
            id=f"chatcmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self.model.id,
            prompt_tokens=len(prepared.prompt_ids),
            thinking=prepared.thinking,
            budget=prepared.budget,
            budget_applied=prepared.budget_applied,
            adapter=prepared.adapters.name,
        )
        generations = [self.engine.submit(request) for request in prepared.requests]
        exchange = Exchange(head, prepared, self.model, generations, self._observer, self._forget, entered)
        self._exchanges[head.id] = exchange
        try:
            self._observer.exchange_started(head)
        except BaseException:
            exchange.abandon()
            raise
        exchange.timer = self._limit(lambda seconds: exchange.fail(exchange.late(seconds)), entered)
        return exchange

    async def score(
        self, request: GenerationRequest, *, entered: float, on_begin: Callable[[], None] = lambda: None
    ) -> tuple[PositionScore, ...]:
        """Run a scoring request; `on_begin` is called once the engine has it.

        Raises the KilnError that it failed with.
        """
        if self._draining:
            raise ShuttingDown("the server is shutting down")
        generation = self.engine.submit(request)
        on_begin()
        self._scoring += 1
        positions: list[PositionScore] = []
        submitted = time.monotonic()
        timer = self._limit(lambda s: generation.cancel(_late(s, submitted, [generation])), entered)
        try:
            async for delivery in generation:
                positions.extend(delivery.scores)
                if delivery.end is not None and delivery.end.reason is not FinishReason.LENGTH:
                    raise delivery.end.error or ShuttingDown("the engine was stopped")
        finally:
            if timer is not None:
                timer.cancel()
            generation.cancel()
            self._scoring -= 1
        return tuple(positions)

    def find(self, exchange_id: str) -> Exchange | None:
        """A live exchange by its id."""
        return self._exchanges.get(exchange_id)

    async def drain(self, grace_s: float) -> None:
        """Refuse new exchanges, let running ones finish for `grace_s` seconds, then cut them."""
        self._draining = True
        deadline = time.monotonic() + grace_s
        while (self._exchanges or self._joined) and time.monotonic() < deadline and not self._hurried:
            await asyncio.sleep(0.02)
        self._cut = True
        for fail in [*self._joined.values(), *(exchange.fail for exchange in self._exchanges.values())]:
            fail(ShuttingDown("the server shut down before the answer was complete"))

    def hurry(self) -> None:
        """Let a drain wait no longer. May be called from a signal handler."""
        self._hurried = True

    async def close(self) -> None:
        # First of all: the threads use the vocabulary that stopping the engine frees.
        await self._workers.close()
        await asyncio.to_thread(self.model.grammars.close)
        await self.engine.stop()
        self.model.adapters.close()

    def _limit(self, cut: Callable[[float], None], entered: float) -> asyncio.TimerHandle | None:
        """Have `cut` called when the configured seconds for a request that came at `entered` are over."""
        seconds = self._request_timeout_s
        if seconds is None:
            return None
        left = max(0.0, entered + seconds - time.monotonic())
        return asyncio.get_running_loop().call_later(left, cut, seconds)

    def _forget(self, exchange_id: str) -> None:
        exchange = self._exchanges.pop(exchange_id, None)
        if exchange is not None and exchange.timer is not None:
            exchange.timer.cancel()
