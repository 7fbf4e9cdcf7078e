"""The schema as numbered steps. A file's `user_version` is the number of the last step it went through.

A step that was released is never edited; a change is a new step at the end.
"""

from __future__ import annotations

from collections.abc import Callable

import apsw

from kiln.core.errors import StoreFailed

Step = Callable[[apsw.Connection], None]
STEPS: list[Step] = []


def migration(number: int) -> Callable[[Step], Step]:
    """Register a function as step `number`; they are numbered from 1 without a gap."""

    def register(step: Step) -> Step:
        assert number == len(STEPS) + 1, f"step {number} stands at place {len(STEPS) + 1}"
        STEPS.append(step)
        return step

    return register


def migrate(connection: apsw.Connection) -> None:
    """Bring the schema up to date, all steps in one transaction.

    Raises StoreFailed for a file that a newer kiln has written.
    """
    if _version(connection) == len(STEPS):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Asked again: another process may have been here before the lock was ours.
        version = _version(connection)
        if version > len(STEPS):
            raise StoreFailed(
                f"the store {connection.filename} has schema {version}, this kiln knows {len(STEPS)}",
                hint="Use the newer kiln that wrote it, or set store.path to another file.",
            )
        for step in STEPS[version:]:
            step(connection)
        connection.execute(f"PRAGMA user_version={len(STEPS)}")
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _version(connection: apsw.Connection) -> int:
    version = connection.execute("PRAGMA user_version").get
    assert isinstance(version, int)
    return version


@migration(1)
def _keys(connection: apsw.Connection) -> None:
    connection.execute(
        """
        CREATE TABLE keys (
            id INTEGER PRIMARY KEY,
            name TEXT NOT NULL,
            prefix TEXT NOT NULL,
            hash BLOB NOT NULL UNIQUE,
            scope TEXT NOT NULL CHECK (scope IN ('inference', 'admin')),
            max_concurrency INTEGER,
            rate_per_minute INTEGER,
            created_at REAL NOT NULL,
            last_used_at REAL,
            revoked_at REAL
        ) STRICT;
        CREATE UNIQUE INDEX live_key_names ON keys (name) WHERE revoked_at IS NULL;
        CREATE TABLE sessions (
            hash BLOB PRIMARY KEY,
            key_id INTEGER NOT NULL REFERENCES keys ON DELETE CASCADE,
            created_at REAL NOT NULL,
            expires_at REAL NOT NULL
        ) STRICT, WITHOUT ROWID;
        CREATE INDEX sessions_by_key ON sessions (key_id);
        """
    )


@migration(2)
def _memory(connection: apsw.Connection) -> None:
    # `scope` makes the full-text index able to look into one memory without reading all the others.
    # `superseded_by` is a row of this table; a fact that is deleted is forgotten there too.
    connection.execute(
        """
        CREATE TABLE memories (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            owner TEXT NOT NULL,
            store TEXT NOT NULL,
            memory TEXT NOT NULL,
            UNIQUE (owner, memory, store)
        ) STRICT;
        CREATE TABLE facts (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            name TEXT NOT NULL UNIQUE,
            memory_id INTEGER NOT NULL REFERENCES memories,
            text TEXT NOT NULL,
            normal TEXT NOT NULL,
            scope TEXT NOT NULL GENERATED ALWAYS AS ('m' || memory_id) VIRTUAL,
            embedding BLOB,
            embedder TEXT,
            created_at REAL NOT NULL,
            last_used_at REAL,
            uses INTEGER NOT NULL DEFAULT 0,
            invalidated_at REAL,
            superseded_by INTEGER REFERENCES facts ON DELETE SET NULL,
            source TEXT
        ) STRICT;
        CREATE UNIQUE INDEX live_facts ON facts (memory_id, normal) WHERE invalidated_at IS NULL;
        CREATE INDEX facts_of_memory ON facts (memory_id, invalidated_at);
        CREATE INDEX superseded_facts ON facts (superseded_by) WHERE superseded_by IS NOT NULL;
        CREATE VIRTUAL TABLE facts_text USING fts5 (
            scope, text, content = 'facts', content_rowid = 'id',
            tokenize = 'porter unicode61 remove_diacritics 2'
        );
        INSERT INTO facts_text (facts_text, rank) VALUES ('secure-delete', 1);
        CREATE TRIGGER fact_written AFTER INSERT ON facts BEGIN
            INSERT INTO facts_text (rowid, scope, text) VALUES (new.id, 'm' || new.memory_id, new.text);
        END;
        CREATE TRIGGER fact_deleted AFTER DELETE ON facts BEGIN
            INSERT INTO facts_text (facts_text, rowid, scope, text)
            VALUES ('delete', old.id, 'm' || old.memory_id, old.text);
        END;
        """
    )
