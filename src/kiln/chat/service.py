"""The chat use case: prepare a turn, submit it, assemble what comes back, account for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TypeVar

from kiln.adapters.registry import AdaptersNotReady
from kiln.chat.exchange.exchange import Exchange, late_error
from kiln.chat.models.served import ServedModel
from kiln.chat.preparing.prepare import Prepared, budget_of, prepare
from kiln.chat.preparing.workers import Workers
from kiln.chat.telemetry.observe import Observer
from kiln.core.completion import ExchangeHead
from kiln.core.errors import InvalidAdapter, InvalidField, KilnError, ShuttingDown
from kiln.core.scoring import PositionScore
from kiln.core.tokens import FinishReason
from kiln.core.turn import ChatTurn
from kiln.engine.ports import Engine, GenerationRequest

T = TypeVar("T")

log = logging.getLogger(__name__)

_ADAPTER_ATTEMPTS = 5


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
        timer = self._limit(lambda s: generation.cancel(late_error(s, submitted, [generation])), entered)
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
