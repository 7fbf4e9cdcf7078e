"""An exchange that runs: what its generations say is assembled, given on, and accounted for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import cast

from kiln.chat.exchange.assemble import ChoiceAssembler, RawEvent
from kiln.chat.exchange.interleave import interleaved
from kiln.chat.models.served import ServedModel
from kiln.chat.preparing.prepare import Prepared
from kiln.chat.telemetry.latency import LatencyLedger
from kiln.chat.telemetry.observe import ChoiceReport, Observer
from kiln.core.access import current_owner
from kiln.core.completion import ChoiceEnd, Completion, ExchangeEvent, ExchangeHead
from kiln.core.errors import KilnError, RequestTimedOut, ShuttingDown
from kiln.core.tokens import FinishReason
from kiln.engine.ports import Generation, GenerationEnd, Timings

log = logging.getLogger(__name__)


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
        return late_error(seconds, self._submitted, self._generations)

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
            if len(self._accounted) == len(self._assemblers):
                self._on_end(self.head.id)
            self._observer.choice_ended(self.head, report)


async def _read(assembler: ChoiceAssembler, events: list[RawEvent]) -> list[ExchangeEvent]:
    """The events with their tool calls parsed and checked, off the event loop where there are some."""
    if assembler.has_unread:
        return await asyncio.to_thread(assembler.read_calls, events)
    return cast(list[ExchangeEvent], events)


def late_error(seconds: float, submitted: float, generations: Sequence[Generation]) -> RequestTimedOut:
    """The error for generations that were submitted at `submitted` and whose `seconds` are over."""
    now = time.monotonic()
    waits = [(now if g.begun is None else g.begun) - submitted for g in generations]
    has_begun = not generations or any(g.begun is not None for g in generations)
    return RequestTimedOut.after(seconds, waited_s=max(waits, default=0.0), has_begun=has_begun)
