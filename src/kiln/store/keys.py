"""API keys and browser sessions at rest. Only hashes of secrets are stored."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, cast

import apsw

from kiln.core.errors import KeyNotFound, KeyRefused
from kiln.core.text import shorten
from kiln.store.database import Database

Scope = Literal["inference", "admin"]

KEY_MARK = "kiln-"
SESSION_MARK = "kilns-"
# A mark and 32 random bytes in URL-safe base64, which has no padding here.
_SECRET_LENGTH = 43
_SHOWN = 6
MAX_CONCURRENCY = 1_000_000
MAX_RATE = 100_000
SESSIONS_PER_KEY = 64

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_COLUMNS = "id, name, prefix, scope, max_concurrency, rate_per_minute, created_at, last_used_at, revoked_at"


@dataclass(frozen=True, slots=True)
class Key:
    """One key. Times are seconds of Unix time; a limit that is None does not limit."""

    id: int
    name: str
    prefix: str
    scope: Scope
    max_concurrency: int | None
    rate_per_minute: int | None
    created_at: float
    last_used_at: float | None
    revoked_at: float | None


@dataclass(frozen=True, slots=True)
class Session:
    """A browser's session: it may do what its key may."""

    key_id: int
    expires_at: float


@dataclass(frozen=True, slots=True)
class KeyRing:
    """Everything that is in force, by the hash of its secret."""

    keys: Mapping[bytes, Key]
    sessions: Mapping[bytes, Session]


def hash_secret(secret: str) -> bytes:
    """SHA-256. Enough without salt or stretching: the secrets are 256 random bits."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def looks_like(mark: str, text: str) -> bool:
    """Whether a text has the form of a key or a session, so that looking it up may be worth it."""
    return len(text) == len(mark) + _SECRET_LENGTH and text.startswith(mark)


class KeyStore:
    """The tables `keys` and `sessions`. Every method blocks; call it on a worker thread."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def create(
        self,
        name: str,
        *,
        scope: Scope = "inference",
        max_concurrency: int | None = None,
        rate_per_minute: int | None = None,
    ) -> tuple[Key, str]:
        """A new key and its secret, which cannot be had again.

        Raises KeyRefused for a bad name or limit, and for the name of a key that is in force.
        """
        _check_name(name)
        _check_limit("max_concurrency", max_concurrency, MAX_CONCURRENCY)
        _check_limit("rate_per_minute", rate_per_minute, MAX_RATE)
        secret = KEY_MARK + secrets.token_urlsafe(32)
        shown = secret[: len(KEY_MARK) + _SHOWN]
        values = (name, shown, hash_secret(secret), scope, max_concurrency, rate_per_minute, time.time())
        with self.database.write() as connection:
            if _live(connection, name) is not None:
                raise KeyRefused(
                    f"there is a key named {name}", param="name", hint="Revoke it first, or use another name."
                )
            row = connection.execute(
                "INSERT INTO keys (name, prefix, hash, scope, max_concurrency, rate_per_minute, created_at)"
                f" VALUES (?, ?, ?, ?, ?, ?, ?) RETURNING {_COLUMNS}",
                values,
            ).fetchall()[0]
        return _key(row), secret

    def list(self) -> list[Key]:
        """All keys, revoked ones included, oldest first."""
        if not self.database.exists:
            return []
        with self.database.read() as connection:
            return [_key(row) for row in connection.execute(f"SELECT {_COLUMNS} FROM keys ORDER BY id")]

    def revoke(self, name: str) -> Key:
        """End the key that is in force under this name, and its sessions. Raises KeyNotFound."""
        key = None
        if self.database.exists:
            with self.database.write() as connection:
                key = _live(connection, name)
                if key is not None:
                    update = "UPDATE keys SET revoked_at = ? WHERE id = ?"
                    connection.execute(update, (time.time(), key.id))
                    connection.execute("DELETE FROM sessions WHERE key_id = ?", (key.id,))
        if key is None:
            raise KeyNotFound(f"no key named {shorten(name)} is in force", param="name")
        return key

    def ring(self) -> KeyRing:
        """All keys and sessions that are in force now."""
        if not self.database.exists:
            return KeyRing({}, {})
        with self.database.read() as connection:
            keys = connection.execute(f"SELECT hash, {_COLUMNS} FROM keys WHERE revoked_at IS NULL")
            by_hash = {cast(bytes, row[0]): _key(row[1:]) for row in keys}
            rows = connection.execute(
                "SELECT s.hash, s.key_id, s.expires_at FROM sessions s JOIN keys k ON k.id = s.key_id"
                " WHERE k.revoked_at IS NULL AND s.expires_at > ?",
                (time.time(),),
            )
            sessions = {h: Session(i, e) for h, i, e in cast(Iterator[tuple[bytes, int, float]], rows)}
        return KeyRing(by_hash, sessions)

    def note_used(self, used: Mapping[int, float]) -> None:
        """Store when keys, by id, were last used."""
        with self.database.write() as connection:
            connection.executemany(
                "UPDATE keys SET last_used_at = max(coalesce(last_used_at, 0), ?) WHERE id = ?",
                [(when, key_id) for key_id, when in used.items()],
            )

    def begin_session(self, key_id: int, seconds: float) -> tuple[Session, str]:
        """A session of a key, and its secret. A key has 64 at most; the oldest give way."""
        secret = SESSION_MARK + secrets.token_urlsafe(32)
        now = time.time()
        session = Session(key_id, now + seconds)
        with self.database.write() as connection:
            connection.execute("DELETE FROM sessions WHERE expires_at <= ?", (now,))
            connection.execute(
                "DELETE FROM sessions WHERE key_id = ?1 AND hash NOT IN"
                " (SELECT hash FROM sessions WHERE key_id = ?1 ORDER BY created_at DESC LIMIT ?2)",
                (key_id, SESSIONS_PER_KEY - 1),
            )
            connection.execute(
                "INSERT INTO sessions (hash, key_id, created_at, expires_at) VALUES (?, ?, ?, ?)",
                (hash_secret(secret), key_id, now, session.expires_at),
            )
        return session, secret

    def end_session(self, secret: str) -> None:
        """End a session; one that is not there has ended before."""
        if self.database.exists:
            with self.database.write() as connection:
                connection.execute("DELETE FROM sessions WHERE hash = ?", (hash_secret(secret),))


def _live(connection: apsw.Connection, name: str) -> Key | None:
    query = f"SELECT {_COLUMNS} FROM keys WHERE name = ? AND revoked_at IS NULL"
    rows = connection.execute(query, (name,)).fetchall()
    return _key(rows[0]) if rows else None


def _key(row: tuple[apsw.SQLiteValue, ...]) -> Key:
    return Key(*row)  # type: ignore[arg-type]  # the table is STRICT


def _check_name(name: str) -> None:
    # Callers without a key go by the name anonymous.
    if not _NAME.fullmatch(name) or name == "anonymous":
        raise KeyRefused(
            f"the name {shorten(name)} is not allowed: up to 64 letters, digits and . _ @ -,"
            " the first one a letter or digit, and not anonymous",
            param="name",
        )


def _check_limit(param: str, limit: int | None, most: int) -> None:
    if limit is not None and not 1 <= limit <= most:
        raise KeyRefused(f"{param} must be from 1 to {most}, not {limit}", param=param)
