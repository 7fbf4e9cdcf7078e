"""Connections to the store's file, and transactions on them.

Everything here blocks on the disk: call it on worker threads only.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw
import sqlite_vec

from kiln.core.errors import StoreFailed
from kiln.store.migrations import migrate

BUSY_TIMEOUT_MS = 5000
# More connections than this are not kept open.
_IDLE_CONNECTIONS = 4


class Database:
    """The SQLite file at `path`. It is made, with its directory, by the first write.

    A write that has returned survives `kill -9` and loss of power: WAL with `synchronous=FULL` syncs the
    log at each commit. Several processes may use one file; a second writer waits up to five seconds.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._idle: list[apsw.Connection] = []
        self._file: tuple[int, int] | None = None
        self._closed = False

    @property
    def exists(self) -> bool:
        return self.path.exists()

    @contextmanager
    def read(self) -> Iterator[apsw.Connection]:
        """One consistent view. Raises StoreFailed where there is no usable file; see `exists`."""
        with self._borrowed(create=False) as connection, _transaction(connection, "DEFERRED"):
            yield connection

    @contextmanager
    def write(self) -> Iterator[apsw.Connection]:
        """A transaction that is on the disk when the block is left, or undone if it raises."""
        # Waiting for a thread of this process is cheaper than SQLite's own polling.
        with self._writing, self._borrowed(create=True) as connection, _transaction(connection, "IMMEDIATE"):
            yield connection

    def close(self) -> None:
        """Close what is open. Connections in use are closed when they are given back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    @contextmanager
    def _borrowed(self, *, create: bool) -> Iterator[apsw.Connection]:
        try:
            connection = self._take(create)
            try:
                yield connection
            finally:
                self._give(connection)
        except apsw.Error as error:
            raise StoreFailed(f"the store {self.path} cannot be used: {error}") from error

    def _take(self, create: bool) -> apsw.Connection:
        with self._lock:
            if self._closed:
                raise StoreFailed(f"the store {self.path} is closed")
            if self._file != (file := self._identity()):
                # The file was replaced or removed: what is open belongs to one that nobody sees.
                for stale in self._idle:
                    stale.close()
                self._idle, self._file = [], file
            if self._idle:
                return self._idle.pop()
            connection = self._open(create)
            self._file = self._identity()
        return connection

    def _give(self, connection: apsw.Connection) -> None:
        with self._lock:
            current = self._file is not None and self._file == self._identity()
            if current and not self._closed and len(self._idle) < _IDLE_CONNECTIONS:
                self._idle.append(connection)
                return
        connection.close()

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _open(self, create: bool) -> apsw.Connection:
        if create:
            self._make_file()
        connection = apsw.Connection(str(self.path), apsw.SQLITE_OPEN_READWRITE)
        try:
            connection.set_busy_timeout(BUSY_TIMEOUT_MS)
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("PRAGMA foreign_keys=ON")
            # What somebody has deleted is overwritten, not only unlinked.
            connection.execute("PRAGMA secure_delete=ON")
            connection.enable_load_extension(True)
            connection.load_extension(sqlite_vec.loadable_path())
            connection.enable_load_extension(False)
            migrate(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _make_file(self) -> None:
        # The file holds what people said: nobody else on the machine may read it. SQLite gives the
        # files beside it the same mode.
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        except OSError as error:
            raise StoreFailed(
                f"the store {self.path} cannot be made: {error.strerror}",
                hint="Set store.path to a file in a directory that may be written.",
            ) from None


@contextmanager
def _transaction(connection: apsw.Connection, kind: str) -> Iterator[None]:
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
