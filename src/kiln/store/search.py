"""Finding facts of one memory by their words, by their meaning and by their age, and fusing the three."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import apsw

from kiln.store.facts import words_of

# Reciprocal rank fusion (Cormack, Clarke, Büttcher 2009): a place in a ranking is worth 1 / (60 + place).
_K = 60
# The newest facts only fill up what words and meaning leave.
_NEWEST_WEIGHT = 0.1
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Candidates:
    """Row ids, best first; those of `meaning` with their cosine distance."""

    words: Sequence[int]
    meaning: Sequence[tuple[int, float]]
    newest: Sequence[int]


def by_words(connection: apsw.Connection, memory_id: int, text: str, limit: int) -> list[int]:
    """Valid facts that share words with a text, ranked by BM25."""
    words = words_of(text)
    if not words:
        return []
    anything = " OR ".join(f'"{word}"' for word in words)
    query = f"(scope : m{memory_id}) AND (text : ({anything}))"
    sql = (
        "SELECT f.id FROM facts_text t JOIN facts f ON f.id = t.rowid"
        " WHERE facts_text MATCH ? AND f.memory_id = ? AND f.invalidated_at IS NULL"
        " ORDER BY bm25(facts_text, 0.0, 1.0), f.id DESC LIMIT ?"
    )
    return [int(row[0]) for row in connection.execute(sql, (query, memory_id, limit))]


def by_meaning(
    connection: apsw.Connection, memory_id: int, embedder: str | None, vector: bytes | None, limit: int
) -> list[tuple[int, float]]:
    """Valid facts with vectors of the same embedder and their cosine distance, nearest first.

    All vectors of the memory are compared: its capacity bounds them.
    """
    if embedder is None or vector is None:
        return []
    sql = (
        "SELECT id, vec_distance_cosine(embedding, ?1) AS distance FROM facts"
        " WHERE memory_id = ?2 AND invalidated_at IS NULL AND embedder = ?3"
        " AND length(embedding) = length(?1) ORDER BY distance LIMIT ?4"
    )
    rows = connection.execute(sql, (vector, memory_id, embedder, limit))
    # The distance to a vector of zeros is not a number, which SQLite gives as NULL.
    return [(int(i), float(d)) for i, d in rows if d is not None]


def by_age(connection: apsw.Connection, memory_id: int, limit: int) -> list[int]:
    """Valid facts, newest first."""
    sql = "SELECT id FROM facts WHERE memory_id = ? AND invalidated_at IS NULL ORDER BY id DESC LIMIT ?"
    return [int(row[0]) for row in connection.execute(sql, (memory_id, limit))]


def fuse(
    connection: apsw.Connection, found: Candidates, now: float, half_life_days: float | None
) -> list[int]:
    """All candidates by their fused rank, which fades by half in each half-life without use."""
    scores: dict[int, float] = {}
    rankings = (
        (found.words, 1.0),
        ([row_id for row_id, _ in found.meaning], 1.0),
        (found.newest, _NEWEST_WEIGHT),
    )
    for ranking, weight in rankings:
        for place, row_id in enumerate(ranking, start=1):
            scores[row_id] = scores.get(row_id, 0.0) + weight / (_K + place)
    if half_life_days is not None:
        for row_id in scores:
            sql = "SELECT max(created_at, coalesce(last_used_at, 0)) FROM facts WHERE id = ?"
            used = float(connection.execute(sql, (row_id,)).get)
            scores[row_id] *= 0.5 ** (max(0.0, now - used) / _DAY_S / half_life_days)
    return sorted(scores, key=lambda row_id: (-scores[row_id], -row_id))
