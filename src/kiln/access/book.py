"""The keys and sessions in force, in memory, so that a request waits for no disk."""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from kiln.core.errors import StoreFailed
from kiln.store.keys import (
    KEY_MARK,
    SESSION_MARK,
    Key,
    KeyRing,
    KeyStore,
    Scope,
    Session,
    hash_secret,
    looks_like,
)

T = TypeVar("T")

log = logging.getLogger(__name__)

# How old the copy in memory may be: a revocation by another process is in force after this time.
FRESH_S = 0.5
# `last used` is kept to the minute: a busy key must not write at every request.
_USED_EVERY_S = 60.0
_NOTED_AFTER_S = 1.0
_BETWEEN_S = 0.02
_LEAD = 8


class KeyBook:
    """Looks secrets up. Lives on the event loop; the store is read and written on threads of its own."""

    def __init__(self, store: KeyStore) -> None:
        self._store = store
        self._take_over(KeyRing({}, {}))
        self._read_at = -math.inf
        self._reading: asyncio.Task[None] | None = None
        self._is_failing = False
        self._used: dict[int, float] = {}
        self._noted: dict[int, float] = {}
        self._noting: asyncio.Task[None] | None = None
        # Two, so that nobody who is to be let in waits for a write.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="kiln-keys")

    async def open(self) -> None:
        """Read the store for the first time. Raises StoreFailed."""
        await self._know(time.monotonic())

    async def close(self) -> None:
        """Write what is left to write, and end the threads."""
        if self._noting is not None:
            self._noting.cancel()
            await asyncio.gather(self._noting, return_exceptions=True)
        await self._do(self._end)
        await asyncio.to_thread(self._threads.shutdown, wait=True)

    @property
    def has_keys(self) -> bool:
        return bool(self._by_id)

    async def refresh(self) -> None:
        """Make sure that what is known is not older than FRESH_S. Raises StoreFailed."""
        await self._know(time.monotonic() - FRESH_S)

    async def key_of(self, secret: str) -> Key | None:
        """The key in force with this secret. Raises StoreFailed."""
        if not looks_like(KEY_MARK, secret):
            return None
        came = time.monotonic()
        await self._know(came - FRESH_S)
        found = self._keys.find(secret)
        if found is None:
            # It may have been made a moment ago.
            await self._know(came)
            found = self._keys.find(secret)
        if found is not None:
            self._touch(found.id)
        return found

    async def session_of(self, secret: str) -> tuple[Session, Key] | None:
        """The session in force with this secret, and its key. Raises StoreFailed."""
        if not looks_like(SESSION_MARK, secret):
            return None
        await self.refresh()
        session = self._sessions.find(secret)
        if session is None or session.expires_at <= time.time():
            return None
        key = self._by_id.get(session.key_id)
        if key is None:
            return None
        self._touch(key.id)
        return session, key

    async def keys(self) -> list[Key]:
        """All keys as they are stored, revoked ones too."""
        return await self._do(self._store.list)

    async def create(
        self, name: str, *, scope: Scope, max_concurrency: int | None, rate_per_minute: int | None
    ) -> tuple[Key, str]:
        """A new key, in force at once, and its secret. Raises KeyRefused."""
        limits = {"max_concurrency": max_concurrency, "rate_per_minute": rate_per_minute}
        return await self._do(lambda: self._store.create(name, scope=scope, **limits))

    async def revoke(self, name: str) -> Key:
        """End a key and its sessions, at once. Raises KeyNotFound."""
        revoked = await self._do(lambda: self._store.revoke(name))
        await self._know(time.monotonic())
        return revoked

    async def begin_session(self, key: Key, seconds: float) -> tuple[Session, str]:
        """A new session of a key, and its secret."""
        begun = await self._do(lambda: self._store.begin_session(key.id, seconds))
        await self._know(time.monotonic())
        return begun

    async def end_session(self, secret: str) -> None:
        if looks_like(SESSION_MARK, secret):
            await self._do(lambda: self._store.end_session(secret))
            await self._know(time.monotonic())

    async def _know(self, moment: float) -> None:
        """Have the store read at `moment` or later."""
        while self._read_at < moment:
            # One reading serves all who wait, and goes on when the request that began it is cancelled.
            if self._reading is None or self._reading.done():
                self._reading = asyncio.get_running_loop().create_task(self._read())
                # A failure is heard even if all who waited have gone.
                self._reading.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.shield(self._reading)

    async def _read(self) -> None:
        # A flood of unknown keys makes so many readings and no more.
        await asyncio.sleep(max(0.0, self._read_at + _BETWEEN_S - time.monotonic()))
        began = time.monotonic()
        try:
            self._take_over(await self._do(self._store.ring))
        except StoreFailed as error:
            if not self._is_failing:
                log.error("the keys cannot be read: %s", error.message)
            self._is_failing = True
            raise
        self._is_failing = False
        self._read_at = began

    def _take_over(self, ring: KeyRing) -> None:
        self._keys = _Index(ring.keys)
        self._sessions = _Index(ring.sessions)
        self._by_id = {key.id: key for key in ring.keys.values()}
        self.has_admin_key = any(key.scope == "admin" for key in ring.keys.values())

    def _touch(self, key_id: int) -> None:
        now = time.time()
        self._used[key_id] = now
        is_due = now - self._noted.get(key_id, 0.0) >= _USED_EVERY_S
        if is_due and (self._noting is None or self._noting.done()):
            self._noting = asyncio.get_running_loop().create_task(self._note_soon())

    async def _note_soon(self) -> None:
        # The uses of a second are one write.
        await asyncio.sleep(_NOTED_AFTER_S)
        await self._do(self._note_due)

    def _note_due(self) -> None:
        now = time.time()
        used = self._used.copy()
        self._note({i: t for i, t in used.items() if now - self._noted.get(i, 0.0) >= _USED_EVERY_S})

    def _end(self) -> None:
        self._note(self._used.copy())
        self._store.database.close()

    def _note(self, used: dict[int, float]) -> None:
        if not used:
            return
        try:
            self._store.note_used(used)
        except StoreFailed as error:
            # Whether a key was used is worth no failed request.
            log.warning("the last use of %d keys was not noted: %s", len(used), error.message)
            return
        self._noted.update(used)
        for key_id, when in used.items():
            if self._used.get(key_id) == when:
                self._used.pop(key_id, None)

    async def _do(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


class _Index(Generic[T]):
    """Finds by hash: a short part of it leads to the entry, the whole is compared in constant time."""

    def __init__(self, held: Mapping[bytes, T]) -> None:
        self._held = {hashed[:_LEAD]: (hashed, value) for hashed, value in held.items()}

    def find(self, secret: str) -> T | None:
        hashed = hash_secret(secret)
        entry = self._held.get(hashed[:_LEAD])
        return entry[1] if entry is not None and hmac.compare_digest(entry[0], hashed) else None
