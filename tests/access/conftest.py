"""A server that asks for keys, over a scripted model, and its store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kiln.store.database import Database
from kiln.store.keys import KeyStore, Scope
from servers.scripted import Stage, staging
from servers.server import Server, chat_body


@dataclass
class Site:
    """The server, its store, its model, and keys made for the tests."""

    server: Server
    store: KeyStore
    stage: Stage

    def key(self, name: str, scope: Scope = "inference", **limits: int) -> dict[str, str]:
        """Headers with a new key."""
        _, secret = self.store.create(name, scope=scope, **limits)
        return {"authorization": f"Bearer {secret}"}

    def ask(self, headers: dict[str, str], **fields: Any) -> httpx.Response:
        body = chat_body("hi", **{"max_tokens": 4, **fields})
        return httpx.post(f"{self.server.url}/v1/chat/completions", json=body, headers=headers, timeout=60)


def site(path: Path, **settings: Any) -> Iterator[Site]:
    with staging(store__path=str(path), **settings) as staged:
        yield Site(staged.server, KeyStore(Database(path)), staged.stage)


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Nobody without a key; pages of one origin may call."""
    path = tmp_path_factory.mktemp("store") / "kiln.db"
    yield from site(path, auth__anonymous=False, server__cors_origins=("https://chat.example",))


@pytest.fixture
def open_site(tmp_path: Path) -> Iterator[Site]:
    """The default on loopback, with a store of its own."""
    yield from site(tmp_path / "kiln.db")


@pytest.fixture(autouse=True)
def quiet(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test finds an empty script and leaves an idle engine."""
    name = next((n for n in ("closed", "open_site") if n in request.fixturenames), None)
    if name is None:
        yield
        return
    found: Site = request.getfixturevalue(name)
    found.stage.clear()
    yield
    found.stage.clear()
