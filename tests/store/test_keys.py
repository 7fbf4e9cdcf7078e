"""Keys and sessions at rest."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from kiln.core.errors import KeyNotFound, KeyRefused
from kiln.store import keys
from kiln.store.database import Database
from kiln.store.keys import KeyStore, hash_secret


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(Database(tmp_path / "kiln.db"))


def test_a_key_is_kept_as_a_hash(store: KeyStore) -> None:
    key, secret = store.create("ana", scope="admin", max_concurrency=2, rate_per_minute=60)
    assert re.fullmatch(r"kiln-[A-Za-z0-9_-]{43}", secret)
    assert secret.startswith(key.prefix) and len(key.prefix) == 11
    assert (key.scope, key.max_concurrency, key.rate_per_minute) == ("admin", 2, 60)
    assert store.ring().keys == {hash_secret(secret): key}
    session, cookie = store.begin_session(key.id, 60)
    everything = b"".join(f.read_bytes() for f in store.database.path.parent.iterdir())
    for text in (secret, cookie):
        assert text.encode() not in everything
        assert text[-20:].encode() not in everything


def test_no_two_keys_are_alike(store: KeyStore) -> None:
    assert len({store.create(f"k{i}")[1] for i in range(20)}) == 20


def test_a_name_is_in_force_once(store: KeyStore) -> None:
    first, _ = store.create("ana")
    with pytest.raises(KeyRefused, match="there is a key named ana"):
        store.create("ana")
    assert store.revoke("ana").id == first.id
    second, secret = store.create("ana")
    assert store.ring().keys == {hash_secret(secret): second}
    assert [key.revoked_at is None for key in store.list()] == [False, True]


@pytest.mark.parametrize("name", ["", "a b", "-a", "ä", "a/b", "a\n", "x" * 65, "ana\0", "anonymous"])
def test_bad_names_are_refused(store: KeyStore, name: str) -> None:
    with pytest.raises(KeyRefused) as caught:
        store.create(name)
    assert caught.value.param == "name"


@pytest.mark.parametrize(
    "limits", [{"max_concurrency": 0}, {"rate_per_minute": -1}, {"rate_per_minute": 10**9}]
)
def test_bad_limits_are_refused(store: KeyStore, limits: dict[str, int]) -> None:
    with pytest.raises(KeyRefused) as caught:
        store.create("ana", **limits)  # type: ignore[arg-type]
    assert caught.value.param == next(iter(limits))
    assert store.list() == []


def test_only_keys_in_force_can_be_revoked(store: KeyStore) -> None:
    with pytest.raises(KeyNotFound):
        store.revoke("ana")
    assert not store.database.exists
    store.create("ana")
    store.revoke("ana")
    with pytest.raises(KeyNotFound):
        store.revoke("ana")


def test_sessions_end_with_time_and_with_their_key(store: KeyStore) -> None:
    key, _ = store.create("ana")
    session, secret = store.begin_session(key.id, 60)
    store.begin_session(key.id, 0)
    assert store.ring().sessions == {hash_secret(secret): session}
    assert 50 < session.expires_at - time.time() <= 60
    store.end_session(secret)
    assert store.ring().sessions == {}
    store.begin_session(key.id, 60)
    store.revoke("ana")
    assert store.ring().sessions == {}


def test_the_oldest_session_gives_way(store: KeyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "SESSIONS_PER_KEY", 3)
    key, _ = store.create("ana")
    secrets = [store.begin_session(key.id, 60)[1] for _ in range(5)]
    assert set(store.ring().sessions) == {hash_secret(secret) for secret in secrets[2:]}


def test_last_use_never_goes_back(store: KeyStore) -> None:
    key, _ = store.create("ana")
    store.note_used({key.id: 2000.0})
    store.note_used({key.id: 1000.0})
    assert store.list()[0].last_used_at == 2000.0
