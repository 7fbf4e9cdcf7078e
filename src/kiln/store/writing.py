"""Writing facts into one memory: no doubles, what is contradicted becomes invalid, what is too much goes."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import apsw

from kiln.core.settings import MemoryStoreSettings
from kiln.store.embedding import Embedder
from kiln.store.facts import Fact, NewFact, Written, normalize, similarity
from kiln.store.search import by_meaning, by_words

# How many facts a new one is compared with.
_COMPARED = 8

COLUMNS = (
    "f.id, f.name, f.text, f.created_at, f.last_used_at, f.uses, f.invalidated_at,"
    " (SELECT s.name FROM facts s WHERE s.id = f.superseded_by), f.source"
)
# What goes first when a memory is full; facts that were just written go last.
_EVICTION = {
    "lru": "coalesce(last_used_at, created_at), id",
    "oldest": "created_at, id",
    "least_used": "uses, coalesce(last_used_at, created_at), id",
}


class Writer:
    """One write transaction on one memory."""

    def __init__(
        self,
        connection: apsw.Connection,
        memory_id: int,
        policy: MemoryStoreSettings,
        now: float,
        embedder: Embedder | None,
    ) -> None:
        self._connection = connection
        self._memory_id = memory_id
        self._policy = policy
        self._now = now
        self._embedder = None if embedder is None else embedder.name
        self._new: list[int] = []

    def write(self, fact: NewFact, vector: bytes | None) -> Written:
        known = self._execute(
            "SELECT id FROM facts WHERE memory_id = ? AND normal = ? AND invalidated_at IS NULL",
            (self._memory_id, normalize(fact.text)),
        )
        if known:
            (row_id,) = known[0]
            # It was said again, which keeps it from fading.
            self._execute("UPDATE facts SET last_used_at = ? WHERE id = ?", (self._now, row_id))
            self._invalidate(self._named(fact.replaces) - {row_id}, row_id)
            return Written(read_fact(self._connection, row_id), "known")
        replaced = self._named(fact.replaces) | self._similar(fact.text, vector)
        row_id = self._insert(fact, vector)
        self._invalidate(replaced, row_id)
        return Written(read_fact(self._connection, row_id), "replaced" if replaced else "added")

    def evict(self) -> None:
        """Delete what exceeds the capacity: of valid facts and, of their history, of invalid ones."""
        order = _EVICTION[self._policy.eviction]
        new = ",".join(map(str, self._new)) or "0"
        for valid, first in (("IS NULL", f"id IN ({new}), {order}"), ("IS NOT NULL", "invalidated_at, id")):
            where = f"memory_id = {self._memory_id} AND invalidated_at {valid}"
            (count,) = self._execute(f"SELECT count(*) FROM facts WHERE {where}")[0]
            if count > self._policy.capacity:
                spare = f"SELECT id FROM facts WHERE {where} ORDER BY {first} LIMIT ?"
                self._execute(f"DELETE FROM facts WHERE id IN ({spare})", (count - self._policy.capacity,))

    def _insert(self, fact: NewFact, vector: bytes | None) -> int:
        (row_id,) = self._execute(
            "INSERT INTO facts (name, memory_id, text, normal, embedding, embedder, created_at, source)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?) RETURNING id",
            (
                f"fact-{secrets.token_hex(8)}",
                self._memory_id,
                fact.text,
                normalize(fact.text),
                vector,
                None if vector is None else self._embedder,
                self._now,
                fact.source,
            ),
        )[0]
        self._new.append(row_id)
        return row_id

    def _similar(self, text: str, vector: bytes | None) -> set[int]:
        """Facts that say almost the same."""
        threshold = self._policy.dedup_threshold
        found = by_meaning(self._connection, self._memory_id, self._embedder, vector, _COMPARED)
        near = {row_id for row_id, distance in found if 1 - distance >= threshold}
        for row_id in by_words(self._connection, self._memory_id, text, _COMPARED):
            if similarity(text, read_fact(self._connection, row_id).text) >= threshold:
                near.add(row_id)
        return near

    def _named(self, ids: Sequence[str]) -> set[int]:
        """Valid facts of this memory by their ids; others are none of its business."""
        sql = "SELECT id FROM facts WHERE memory_id = ? AND name = ? AND invalidated_at IS NULL"
        return {row_id for name in ids for (row_id,) in self._execute(sql, (self._memory_id, name))}

    def _invalidate(self, rows: set[int], by: int) -> None:
        self._connection.executemany(
            "UPDATE facts SET invalidated_at = ?, superseded_by = ? WHERE id = ?",
            [(self._now, by, row_id) for row_id in rows],
        )

    def _execute(self, sql: str, values: tuple[apsw.SQLiteValue, ...] = ()) -> list[tuple[int, ...]]:
        rows: list[tuple[int, ...]] = self._connection.execute(sql, values).fetchall()  # type: ignore[assignment]
        return rows


def read_fact(connection: apsw.Connection, row_id: int) -> Fact:
    return to_fact(
        connection.execute(f"SELECT {COLUMNS} FROM facts f WHERE f.id = ?", (row_id,)).fetchall()[0]
    )


def to_fact(row: tuple[apsw.SQLiteValue, ...]) -> Fact:
    return Fact(*row[1:])  # type: ignore[arg-type]  # the table is STRICT
