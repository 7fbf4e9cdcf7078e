"""The tables of memory: writing without doubles, recalling by words and by meaning, forgetting.

Every method blocks; call it on a worker thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import apsw

from kiln.core.errors import FactNotFound, KilnError
from kiln.core.settings import MemoryStoreSettings
from kiln.core.text import shorten
from kiln.store.database import Database
from kiln.store.embedding import Embedder, to_blob
from kiln.store.facts import Fact, MemoryKey, NewFact, Written, clean, normalize
from kiln.store.search import Candidates, by_age, by_meaning, by_words, fuse
from kiln.store.writing import COLUMNS, Writer, read_fact, to_fact

log = logging.getLogger(__name__)

# Facts without a vector of the present embedder that a write brings up to date.
_BACKLOG = 64
_EXPORT_ROWS = 500


@dataclass(frozen=True, slots=True)
class MemorySummary:
    """One memory of an owner, and how many valid facts it has."""

    memory: str
    store: str
    facts: int


class MemoryTables:
    """Facts by memory. With an embedder they are also found by meaning."""

    def __init__(
        self, database: Database, embedder: Embedder | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.database = database
        self._embedder = embedder
        self._clock = clock

    def write(self, key: MemoryKey, policy: MemoryStoreSettings, facts: Sequence[NewFact]) -> list[Written]:
        """Write facts; when this returns they are on the disk.

        Equal words are known. From the policy's similarity on, and where it says so, a fact takes the place
        of others, which become invalid. What exceeds the capacity is deleted. What has no words is left out.
        """
        wanted = [NewFact(text, f.replaces, f.source) for f in facts if normalize(text := clean(f.text))]
        vectors = self._embed([f.text for f in wanted])
        if not wanted:
            return []
        with self.database.write() as connection:
            writer = Writer(connection, _memory_id(connection, key), policy, self._clock(), self._embedder)
            written = [writer.write(f, v) for f, v in zip(wanted, vectors, strict=True)]
            writer.evict()
        self._catch_up(key)
        return written

    def recall(
        self, key: MemoryKey, policy: MemoryStoreSettings, text: str, *, depth: int | None = None
    ) -> tuple[list[Fact], list[str]]:
        """The facts that go with a text, best first, and the ids of those that it speaks of.

        Full-text and vector ranks are fused; what neither finds is filled up with the newest facts.
        """
        depth = policy.recall_depth if depth is None else depth
        vector = self._embed([text])[0]
        rows, matched = self._search(key, text, vector, depth, policy.half_life_days, fill=True)
        return rows, matched

    def search(self, key: MemoryKey, text: str, limit: int) -> list[Fact]:
        """Valid facts that speak of a text, best first."""
        return self._search(key, text, self._embed([text])[0], limit, None, fill=False)[0]

    def note_used(self, key: MemoryKey, ids: Sequence[str]) -> None:
        """Count a use of facts."""
        if ids and self.database.exists:
            with self.database.write() as connection:
                connection.executemany(
                    "UPDATE facts SET uses = uses + 1, last_used_at = ? WHERE name = ? AND memory_id ="
                    " (SELECT id FROM memories WHERE owner = ? AND memory = ? AND store = ?)",
                    [(self._clock(), name, key.owner, key.memory, key.store) for name in ids],
                )

    def facts(
        self, key: MemoryKey, *, limit: int, before: str | None = None, invalid: bool = False
    ) -> list[Fact]:
        """Facts, newest first, those older than the one with the id `before`; `invalid` ones if asked for.

        Raises FactNotFound where `before` is not there: an empty page would pass for the end.
        """
        if not self.database.exists:
            if before is not None:
                raise _no_such(before)
            return []
        sql = f"SELECT {COLUMNS} FROM facts f WHERE f.memory_id = ?1"
        sql += "" if invalid else " AND f.invalidated_at IS NULL"
        sql += " AND (?2 IS NULL OR f.id < ?2)"
        with self.database.read() as connection:
            found = _find_memory(connection, key)
            below = None if before is None else _row_of(connection, found, before)
            rows = connection.execute(f"{sql} ORDER BY f.id DESC LIMIT ?3", (found, below, limit))
            return [to_fact(row) for row in rows]

    def export(self, key: MemoryKey) -> Iterator[list[Fact]]:
        """All facts, oldest first, invalid ones too, some hundreds at a time."""
        last: Any = 0
        while self.database.exists:
            sql = f"SELECT {COLUMNS} FROM facts f WHERE f.memory_id = ? AND f.id > ? ORDER BY f.id LIMIT ?"
            with self.database.read() as connection:
                found = _find_memory(connection, key)
                rows = connection.execute(sql, (found, last, _EXPORT_ROWS)).fetchall()
            if not rows:
                return
            last = rows[-1][0]
            yield [to_fact(row) for row in rows]

    def delete(self, key: MemoryKey, fact_id: str) -> bool:
        """Delete one fact for good. Whether it was there."""
        if not self.database.exists:
            return False
        with self.database.write() as connection:
            found = _find_memory(connection, key)
            connection.execute("DELETE FROM facts WHERE memory_id = ? AND name = ?", (found, fact_id))
            return connection.changes() > 0

    def clear(self, key: MemoryKey) -> int:
        """Delete a memory for good. How many facts it had, invalid ones too."""
        if not self.database.exists:
            return 0
        with self.database.write() as connection:
            found = _find_memory(connection, key)
            connection.execute("DELETE FROM facts WHERE memory_id = ?", (found,))
            deleted = connection.changes()
            connection.execute("DELETE FROM memories WHERE id = ?", (found,))
        return deleted

    def memories(self, owner: str) -> list[MemorySummary]:
        """What an owner has, by name."""
        if not self.database.exists:
            return []
        sql = (
            "SELECT m.memory, m.store, count(f.id) FROM memories m"
            " LEFT JOIN facts f ON f.memory_id = m.id AND f.invalidated_at IS NULL"
            " WHERE m.owner = ? GROUP BY m.id ORDER BY m.memory, m.store"
        )
        with self.database.read() as connection:
            return [MemorySummary(*row) for row in connection.execute(sql, (owner,))]

    def _search(
        self,
        key: MemoryKey,
        text: str,
        vector: bytes | None,
        limit: int,
        half_life_days: float | None,
        *,
        fill: bool,
    ) -> tuple[list[Fact], list[str]]:
        if not self.database.exists:
            return [], []
        with self.database.read() as connection:
            memory_id = _find_memory(connection, key)
            if memory_id is None:
                return [], []
            found = Candidates(
                words=by_words(connection, memory_id, text, limit * 4),
                meaning=by_meaning(connection, memory_id, self._name, vector, limit * 4),
                newest=by_age(connection, memory_id, limit) if fill else [],
            )
            ranked = fuse(connection, found, self._clock(), half_life_days)[:limit]
            facts = [read_fact(connection, row_id) for row_id in ranked]
        matched = {*found.words, *(row_id for row_id, _ in found.meaning)}
        return facts, [fact.id for fact, row_id in zip(facts, ranked, strict=True) if row_id in matched]

    @property
    def _name(self) -> str | None:
        return None if self._embedder is None else self._embedder.name

    def _embed(self, texts: Sequence[str]) -> list[bytes | None]:
        if self._embedder is None or not texts:
            return [None] * len(texts)
        try:
            vectors = self._embedder(texts)
        except KilnError as error:
            # Words are enough to go on; a later write brings the vectors.
            log.warning("memory goes without vectors: %s", error.message)
            return [None] * len(texts)
        return [to_blob(vector) for vector in vectors]

    def _catch_up(self, key: MemoryKey) -> None:
        """Give vectors to facts that were written without this embedder."""
        if self._embedder is None:
            return
        with self.database.read() as connection:
            sql = (
                "SELECT id, text FROM facts WHERE memory_id = ? AND invalidated_at IS NULL"
                " AND embedder IS NOT ? LIMIT ?"
            )
            rows = connection.execute(sql, (_find_memory(connection, key), self._name, _BACKLOG)).fetchall()
        vectors = self._embed([str(text) for _, text in rows])
        if any(vector is not None for vector in vectors):
            with self.database.write() as connection:
                connection.executemany(
                    "UPDATE facts SET embedding = ?, embedder = ? WHERE id = ?",
                    [(v, self._name, row_id) for v, (row_id, _) in zip(vectors, rows, strict=True)],
                )


def _find_memory(connection: apsw.Connection, key: MemoryKey) -> int | None:
    sql = "SELECT id FROM memories WHERE owner = ? AND memory = ? AND store = ?"
    found: int | None = connection.execute(sql, (key.owner, key.memory, key.store)).get
    return found


def _row_of(connection: apsw.Connection, memory_id: int | None, fact_id: str) -> int:
    sql = "SELECT id FROM facts WHERE memory_id = ? AND name = ?"
    row: int | None = connection.execute(sql, (memory_id, fact_id)).get
    if row is None:
        raise _no_such(fact_id)
    return row


def _no_such(before: str) -> FactNotFound:
    return FactNotFound(f"there is no fact {shorten(before)} in this memory", param="before")


def _memory_id(connection: apsw.Connection, key: MemoryKey) -> int:
    sql = "INSERT OR IGNORE INTO memories (owner, memory, store) VALUES (?, ?, ?)"
    connection.execute(sql, (key.owner, key.memory, key.store))
    found = _find_memory(connection, key)
    assert found is not None
    return found
