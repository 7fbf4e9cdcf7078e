"""Names of exchanges belong to the key that gave them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from kiln.store.database import Database
from kiln.store.keys import KeyStore
from servers.scripted import Stage, staging
from servers.server import Server

from .api import CHAT, SKIP, native_body

Keyed = tuple[Server, Stage, dict[str, dict[str, str]]]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    """A server that asks for keys, its model, and the headers of two keys."""
    path = tmp_path_factory.mktemp("store") / "kiln.db"
    with staging(store__path=str(path), auth__anonymous=False) as staged:
        store = KeyStore(Database(path))
        headers = {name: {"authorization": f"Bearer {store.create(name)[1]}"} for name in ("mine", "other")}
        yield staged.server, staged.stage, headers


@contextmanager
def running(server: Server, headers: dict[str, str], **fields: Any) -> Iterator[None]:
    body = native_body(stream=True, max_tokens=4000, **fields)
    with httpx.stream("POST", server.url + CHAT, json=body, headers=headers, timeout=60) as response:
        assert response.status_code == 200, response.read()
        lines = response.iter_lines()
        next(lines)
        yield


def test_nobody_gets_in_without_a_key(keyed: Keyed) -> None:
    server, _, _ = keyed
    for path in (CHAT, SKIP):
        refused = httpx.post(server.url + path, json=native_body())
        assert refused.status_code == 401
        assert set(refused.json()) == {"error", "code"}


def test_one_name_may_be_used_by_two_keys(keyed: Keyed) -> None:
    server, stage, headers = keyed
    stage.repeat("1")
    stage.pace_s = 0.005

    def skip(name: str, key: str) -> int:
        body = {"request_id": name}
        return httpx.post(server.url + SKIP, json=body, headers=headers[key], timeout=60).status_code

    with running(server, headers["mine"], request_id="same"):
        assert skip("same", "other") == 404
        with running(server, headers["other"], request_id="same"):
            taken = httpx.post(
                server.url + CHAT, json=native_body(request_id="same"), headers=headers["mine"], timeout=60
            )
            assert taken.status_code == 409
            assert skip("same", "mine") == skip("same", "other") == 202
    stage.clear()
    server.client.headers.update(headers["mine"])
    server.wait_idle()
