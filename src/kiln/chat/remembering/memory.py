"""Memory: what earlier exchanges told, recalled for the next one; and learning from an exchange afterwards.

A chat route makes two calls. Before it renders the prompt it awaits `recall` and puts `as_context` of the
facts into the system message; after the answer is out it calls `learn`, which returns at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kiln.core.errors import InvalidField, KilnError, MemoryOff, MemoryStoreNotFound, StoreFailed
from kiln.core.settings import MemoryStoreSettings
from kiln.core.text import shorten
from kiln.store.facts import Fact, MemoryKey, NewFact, Written, is_memory_id
from kiln.store.memory import MemoryTables

T = TypeVar("T")

log = logging.getLogger(__name__)

DEFAULT_STORE = "default"
# Exchanges that may wait to be learned from; more are not learned from.
MAX_WAITING = 64
# Facts that the extraction is told, so that it can say what has changed.
KNOWN_FACTS = 16
_READERS = 2


@dataclass(frozen=True, slots=True)
class Transcript:
    """A finished exchange to learn from: the user's last message and the answer. `model` answered it."""

    key: MemoryKey
    exchange_id: str
    model: str
    question: str
    answer: str


class Extractor(Protocol):
    """Finds the facts of a transcript."""

    async def __call__(self, transcript: Transcript, known: Sequence[Fact]) -> list[NewFact]:
        """New facts; one that contradicts `known` ones has their ids in `replaces`.

        Raises KilnError where the model could not be asked; output that is no facts is no facts.
        """
        ...


class Memory:
    """The memories of all callers, under named policies. Lives on the event loop.

    `tables` None means that memory is off: nothing is recalled or learned, and looking into it is refused.
    """

    def __init__(
        self,
        tables: MemoryTables | None,
        stores: Mapping[str, MemoryStoreSettings],
        extractor: Extractor | None = None,
    ) -> None:
        self._tables = tables
        self._stores = {DEFAULT_STORE: MemoryStoreSettings(), **stores}
        self._extractor = extractor
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="kiln-memory")
        # SQLite has one writer at a time. One that waits for another process must not keep readers waiting.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kiln-memory-write")
        self._waiting: asyncio.Queue[Transcript] = asyncio.Queue(MAX_WAITING)
        self._learner: asyncio.Task[None] | None = None
        self._noting: set[asyncio.Task[None]] = set()
        self._is_learning = False
        self._closed = False

    @property
    def is_on(self) -> bool:
        return self._tables is not None

    @property
    def stores(self) -> Mapping[str, MemoryStoreSettings]:
        return self._stores

    def key(self, owner: str, memory_id: str, store: str | None = None) -> MemoryKey:
        """The memory that a request names; `store` None is the default one.

        Raises InvalidField for an id that is none, MemoryStoreNotFound for an unknown store.
        """
        if not is_memory_id(memory_id):
            raise InvalidField(
                f"memory {shorten(memory_id)} must be 1 to 64 letters, digits, dashes and underscores",
                param="memory",
            )
        name = DEFAULT_STORE if store is None else store
        if name not in self._stores:
            raise MemoryStoreNotFound(f"there is no memory store {shorten(name)}", param="memory_store")
        return MemoryKey(owner, memory_id, name)

    async def recall(self, owner: str, memory_id: str, store: str | None, text: str) -> list[Fact]:
        """What is remembered that goes with `text`, best first, at most the store's recall_depth.

        Empty where memory is off. Raises InvalidField or MemoryStoreNotFound. A store that fails costs the
        facts, not the exchange.
        """
        if self._tables is None:
            return []
        tables, key = self._tables, self.key(owner, memory_id, store)
        policy = self._stores[key.store]
        try:
            facts, matched = await self.in_worker(lambda: tables.recall(key, policy, text))
        except StoreFailed as error:
            log.error("nothing was recalled: %s", error.message)
            return []
        self._note_used(key, matched)
        return facts

    def learn(self, transcript: Transcript) -> None:
        """Have facts extracted from an exchange, later and one exchange at a time. Never blocks or raises."""
        if self._tables is None or self._extractor is None or self._closed:
            return
        if not self._stores[transcript.key.store].extraction:
            return
        try:
            self._waiting.put_nowait(transcript)
        except asyncio.QueueFull:
            log.warning("%s is not learned from: %d exchanges wait", transcript.exchange_id, MAX_WAITING)
            return
        if self._learner is None:
            self._learner = asyncio.create_task(self._learn_all(self._tables, self._extractor))

    async def write(self, key: MemoryKey, facts: Sequence[NewFact]) -> list[Written]:
        """Write facts. They are on the disk when this returns. Raises StoreFailed or MemoryOff."""
        return await self.change(lambda tables: tables.write(key, self._stores[key.store], facts))

    async def look(self, function: Callable[[MemoryTables], T]) -> T:
        """Run `function`, which reads, on a worker thread. Raises MemoryOff."""
        tables = self._on()
        return await self.in_worker(lambda: function(tables))

    async def change(self, function: Callable[[MemoryTables], T]) -> T:
        """Run `function`, which writes, on the worker thread for that. Raises MemoryOff."""
        tables = self._on()
        return await asyncio.get_running_loop().run_in_executor(self._writer, lambda: function(tables))

    def _on(self) -> MemoryTables:
        if self._tables is None:
            raise MemoryOff("memory is switched off on this server")
        return self._tables

    async def in_worker(self, function: Callable[[], T]) -> T:
        """Run what reads on a worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, function)

    async def idle(self) -> None:
        """Wait until nothing is left to be learned from."""
        await self._waiting.join()

    async def end_learning(self) -> None:
        """Learn no more: the shutdown waits for answers, not for this. What waits is dropped. Idempotent."""
        self._closed = True
        learner, self._learner = self._learner, None
        if learner is None:
            return
        dropped = self._waiting.qsize() + self._is_learning
        learner.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await learner
        if dropped:
            log.warning("%d exchanges were not learned from: the server stops", dropped)

    async def close(self) -> None:
        """Finish what is being written, and close the file."""
        await self.end_learning()
        await asyncio.gather(*self._noting)
        for threads in (self._readers, self._writer):
            await asyncio.to_thread(threads.shutdown, wait=True)
        if self._tables is not None:
            self._tables.database.close()

    async def _learn_all(self, tables: MemoryTables, extractor: Extractor) -> None:
        while True:
            transcript = await self._waiting.get()
            self._is_learning = True
            try:
                await self._learn(tables, extractor, transcript)
            except KilnError as error:
                log.warning("%s is not learned from: %s", transcript.exchange_id, error.message)
            except Exception:
                # The next exchange is none the worse for it.
                log.exception("learning from %s failed", transcript.exchange_id)
            finally:
                self._is_learning = False
                self._waiting.task_done()

    async def _learn(self, tables: MemoryTables, extractor: Extractor, transcript: Transcript) -> None:
        key = transcript.key
        policy = self._stores[key.store]
        said = f"{transcript.question}\n{transcript.answer}"
        known, _ = await self.in_worker(lambda: tables.recall(key, policy, said, depth=KNOWN_FACTS))
        facts = await extractor(transcript, known)
        if facts:
            written = await self.write(key, facts)
            log.debug("%d facts learned from %s", len(written), transcript.exchange_id)

    def _note_used(self, key: MemoryKey, ids: Sequence[str]) -> None:
        """Count the use of facts, without the exchange waiting for the disk."""
        if ids and not self._closed:
            task = asyncio.create_task(self._note(key, ids))
            self._noting.add(task)
            task.add_done_callback(self._noting.discard)

    async def _note(self, key: MemoryKey, ids: Sequence[str]) -> None:
        try:
            await self.change(lambda tables: tables.note_used(key, ids))
        except StoreFailed as error:
            log.warning("the use of %d facts was not noted: %s", len(ids), error.message)


def as_context(facts: Sequence[Fact]) -> str:
    """Facts as a part of the system message; empty without facts."""
    if not facts:
        return ""
    lines = "\n".join(f"- {fact.text}" for fact in facts)
    return f"What is remembered from earlier conversations with the user, to be used where it helps:\n{lines}"
