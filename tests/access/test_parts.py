"""Limits, cross-site requests, and keys in memory, each alone."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path

import pytest

from kiln.access.book import KeyBook
from kiln.access.limits import Limits
from kiln.access.origin import is_cross_site, is_rebound
from kiln.core.errors import StoreFailed, TooManyAtOnce, TooManyPerMinute
from kiln.http.guard import required_scope
from kiln.store.database import Database
from kiln.store.keys import Key, KeyStore

TRUSTED = frozenset({"https://chat.example"})


def key(**limits: int | None) -> Key:
    values = {"max_concurrency": None, "rate_per_minute": None, **limits}
    return Key(1, "ana", "kiln-abc", "inference", created_at=0, last_used_at=None, revoked_at=None, **values)


class TestLimits:
    def test_at_once(self) -> None:
        limits = Limits()
        first, _ = limits.enter(key(max_concurrency=2)), limits.enter(key(max_concurrency=2))
        with pytest.raises(TooManyAtOnce):
            limits.enter(key(max_concurrency=2))
        first()
        first()
        limits.enter(key(max_concurrency=2))
        with pytest.raises(TooManyAtOnce):
            limits.enter(key(max_concurrency=2))

    def test_a_minute(self) -> None:
        now = [0.0]
        limits = Limits(lambda: now[0])
        for second in (0, 10, 20):
            now[0] = second
            limits.enter(key(rate_per_minute=3))()
        now[0] = 29.5
        for _ in range(5):  # refused ones do not count
            with pytest.raises(TooManyPerMinute) as caught:
                limits.enter(key(rate_per_minute=3))
        assert caught.value.retry_after_s == 31
        now[0] = 60.0
        limits.enter(key(rate_per_minute=3))
        with pytest.raises(TooManyPerMinute) as caught:
            limits.enter(key(rate_per_minute=3))
        assert caught.value.retry_after_s == 10

    def test_what_is_refused_for_concurrency_does_not_count_for_the_rate(self) -> None:
        limits = Limits(lambda: 0.0)
        leave = limits.enter(key(max_concurrency=1, rate_per_minute=2))
        with pytest.raises(TooManyAtOnce, match="1 request of the key ana is running, at most 1 may"):
            limits.enter(key(max_concurrency=1, rate_per_minute=2))
        leave()
        limits.enter(key(max_concurrency=1, rate_per_minute=2))

    def test_without_limits_nothing_is_refused(self) -> None:
        limits = Limits()
        for _ in range(1000):
            limits.enter(key())


@pytest.mark.parametrize(
    ("method", "headers", "cross"),
    [
        ("POST", {}, False),
        ("POST", {"origin": "http://h:1", "host": "h:1"}, False),
        ("POST", {"origin": "http://h:2", "host": "h:1"}, True),
        ("POST", {"origin": "null", "host": "h:1"}, True),
        ("POST", {"origin": "http://[", "host": "h:1"}, True),
        ("DELETE", {"origin": "https://evil.example", "host": "h:1"}, True),
        ("GET", {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}, False),
        ("POST", {"sec-fetch-site": "cross-site"}, True),
        ("POST", {"sec-fetch-site": "same-site"}, True),
        ("POST", {"sec-fetch-site": "same-origin", "origin": "https://proxy.example", "host": "h:1"}, False),
        ("POST", {"sec-fetch-site": "none"}, False),
        ("POST", {"sec-fetch-site": "cross-site", "origin": "https://chat.example"}, False),
    ],
)
def test_cross_site(method: str, headers: dict[str, str], cross: bool) -> None:
    assert is_cross_site(method, headers, TRUSTED) is cross


@pytest.mark.parametrize(
    ("host", "rebound"),
    [
        ("127.0.0.1:8420", False),
        ("[::1]:8420", False),
        ("[::1]", False),
        ("localhost:8420", False),
        ("LOCALHOST.:8420", False),
        ("host.docker.internal:8420", False),
        ("gateway", False),
        ("nas.local:8420", False),
        ("", False),
        ("chat.example", False),
        ("chat.example:8420", True),
        ("evil.example", True),
        ("evil.example.:8420", True),
        ("127.0.0.1.evil.example:8420", True),
        ("localhost.evil.example", True),
    ],
)
def test_rebound_names(host: str, rebound: bool) -> None:
    assert is_rebound(host, TRUSTED) is rebound


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("GET", "/health", "open"),
        ("GET", "/contracts/x.json", "open"),
        ("GET", "/docs", "open"),
        ("GET", "/docs/", "inference"),
        ("GET", "/metrics", "inference"),
        ("GET", "/v1/config", "inference"),
        ("POST", "/v1/openai/chat/completions", "inference"),
        ("GET", "/v1/adapters", "inference"),
        ("POST", "/v1/adapters/load", "admin"),
        ("DELETE", "/v1/adapters/x", "admin"),
        ("POST", "/v1/adaptersx", "inference"),
        ("GET", "/nobody/thought/of/this", "inference"),
        ("OPTIONS", "/v1/chat/completions", "inference"),
    ],
)
def test_what_needs_what(method: str, path: str, scope: str) -> None:
    assert required_scope(method, path) == scope


class TestBook:
    @pytest.fixture
    def store(self, tmp_path: Path) -> KeyStore:
        return KeyStore(Database(tmp_path / "kiln.db"))

    async def test_a_new_key_is_known_at_once_and_a_revoked_one_forgotten(self, store: KeyStore) -> None:
        book = KeyBook(store)
        await book.open()
        assert not book.has_keys
        made, secret = await asyncio.to_thread(store.create, "ana")
        assert await book.key_of(secret) == made
        assert await book.key_of(secret[:-1] + ("a" if secret[-1] != "a" else "b")) is None
        assert await book.key_of("sk-anything") is None
        # By another process, as the command line would.
        await asyncio.to_thread(KeyStore(Database(store.database.path)).revoke, "ana")
        for _ in range(400):
            if await book.key_of(secret) is None:
                break
            await asyncio.sleep(0.01)
        else:
            raise AssertionError("the key is still in force")
        await book.close()

    async def test_a_new_key_is_known_while_others_are_looked_up(self, store: KeyStore) -> None:
        """A reading that began before a key was made does not decide about it."""
        book = KeyBook(store)
        await book.open()

        async def ask_wrongly(i: int) -> None:
            while not done.is_set():
                assert await book.key_of(f"kiln-{i:043d}") is None

        done = asyncio.Event()
        flood = [asyncio.create_task(ask_wrongly(i)) for i in range(5)]
        for i in range(10):
            made, secret = await asyncio.to_thread(store.create, f"k{i}")
            assert await book.key_of(secret) == made
        done.set()
        await asyncio.gather(*flood)
        await book.close()

    async def test_a_request_that_goes_away_does_not_take_the_reading_with_it(self, store: KeyStore) -> None:
        _, secret = store.create("ana")
        book = KeyBook(store)
        asking = [asyncio.create_task(book.key_of(secret)) for _ in range(5)]
        await asyncio.sleep(0)
        asking[0].cancel()
        found = await asyncio.gather(*asking, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert all(isinstance(k, Key) for k in found[1:])
        await book.close()

    async def test_last_use_is_written_when_the_book_is_closed(self, store: KeyStore) -> None:
        _, secret = store.create("ana")
        book = KeyBook(store)
        before = time.time()
        await book.key_of(secret)
        await book.close()
        used = KeyStore(Database(store.database.path)).list()[0].last_used_at
        assert used is not None and before <= used <= time.time()

    async def test_an_expired_session_is_none(self, store: KeyStore) -> None:
        made, _ = store.create("ana")
        book = KeyBook(store)
        session, secret = await book.begin_session(made, 0.3)
        assert await book.session_of(secret) == (session, made)
        while time.time() < session.expires_at:
            await asyncio.sleep(0.02)
        assert await book.session_of(secret) is None
        await book.close()

    async def test_a_store_that_breaks_lets_nobody_in(self, store: KeyStore, tmp_path: Path) -> None:
        _, secret = store.create("ana")
        book = KeyBook(store)
        assert await book.key_of(secret) is not None
        for file in tmp_path.iterdir():
            file.unlink()
        (tmp_path / "kiln.db").write_text("this is no database\n" * 100)
        with pytest.raises(StoreFailed):
            for _ in range(400):
                await book.key_of(secret)
                await asyncio.sleep(0.01)
        await book.close()

    async def test_a_locked_store_delays_nobody_but_who_asks_it(self, store: KeyStore) -> None:
        """While another process writes, keys are read and the event loop turns."""
        _, secret = store.create("ana")
        book = KeyBook(store)
        writer = sqlite3.connect(store.database.path, isolation_level=None)
        writer.execute("BEGIN IMMEDIATE")
        assert await asyncio.wait_for(book.key_of(secret), 30) is not None
        writer.execute("ROLLBACK")
        writer.close()
        await book.close()
