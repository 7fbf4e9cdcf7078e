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
