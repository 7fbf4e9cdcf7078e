"""Memory over HTTP, for the person whose it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import apsw
import httpx
import pytest

from kiln.core.settings import MemoryStoreSettings, Settings
from kiln.store.database import Database
from kiln.store.keys import KeyStore
from servers.server import Server, serving_model, settings_of, wait_until

URL = "/lmkit/v1/memory"


def settings(path: Path, **values: Any) -> Settings:
    """Settings with a store `notes` whose memories hold three facts."""
    stores = {"notes": MemoryStoreSettings(capacity=3)}
    return replace(settings_of(store__path=str(path), **values), memory=stores)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory") / "kiln.db"


@pytest.fixture(scope="module")
def server(file: Path) -> Iterator[Server]:
    with serving_model(settings(file)) as running:
        yield running


@pytest.fixture(autouse=True)
def empty(server: Server) -> Iterator[None]:
    yield
    for memory in server.client.get(URL).json()["memories"]:
        server.client.delete(f"{URL}/{memory['memory']}?store={memory['store']}")


def write(server: Server, text: str, memory: str = "home", **query: str) -> httpx.Response:
    return server.client.post(f"{URL}/{memory}", json={"text": text}, params=query)


def texts(server: Server, memory: str = "home", **query: str) -> list[str]:
    response = server.client.get(f"{URL}/{memory}", params=query)
    assert response.status_code == 200, response.text
    return [fact["text"] for fact in response.json()["facts"]]


def test_a_fact_from_writing_to_deleting(server: Server) -> None:
    written = write(server, "The user likes tea.")
    assert written.status_code == 201
    fact = written.json()["fact"]
    assert (written.json()["status"], fact["text"], fact["source"]) == ("added", "The user likes tea.", None)
    known = write(server, "the user likes TEA")
    assert (known.status_code, known.json()["status"]) == (200, "known")
    assert known.json()["fact"]["id"] == fact["id"]
    write(server, "Lunch is at noon")
    assert texts(server) == ["Lunch is at noon", "The user likes tea."]
    assert texts(server, q="what about tea") == ["The user likes tea."]
    shown = {"memory": "home", "store": "default", "facts": 2}
    assert server.client.get(URL).json() == {"memories": [shown]}
    assert server.client.delete(f"{URL}/home/{fact['id']}").json() == {"deleted": 1}
    gone = server.client.delete(f"{URL}/home/{fact['id']}")
    assert (gone.status_code, gone.json()["code"]) == (404, "fact_not_found")
    assert server.client.delete(f"{URL}/home").json() == {"deleted": 1}
    assert server.client.get(URL).json() == {"memories": []}


def test_pages(server: Server) -> None:
    for word in ("alpha", "beta", "gamma"):
        write(server, word)
    first = server.client.get(f"{URL}/home", params={"limit": 2}).json()
    assert [fact["text"] for fact in first["facts"]] == ["gamma", "beta"]
    second = server.client.get(f"{URL}/home", params={"limit": 2, "before": first["next"]}).json()
    assert ([fact["text"] for fact in second["facts"]], second["next"]) == (["alpha"], None)


def test_a_page_after_a_fact_that_has_gone_is_no_empty_page(server: Server) -> None:
    for word in ("alpha", "beta", "gamma"):
        write(server, word)
    mark = server.client.get(f"{URL}/home", params={"limit": 2}).json()["next"]
    server.client.delete(f"{URL}/home/{mark}")
    response = server.client.get(f"{URL}/home", params={"before": mark})
    assert (response.status_code, response.json()["code"]) == (404, "fact_not_found")
    assert response.json()["error"].startswith("`before`")


def test_an_unknown_store_is_refused_by_the_name_that_the_query_has(server: Server) -> None:
    assert "`store`" in server.client.get(f"{URL}/home", params={"store": "nothing"}).json()["error"]


def test_the_history_is_shown_on_request_and_exported(server: Server) -> None:
    old = "The user works in the engine team of a firm in Berlin"
    new = "The user works in the engine team of a firm in Bremen"
    write(server, old)
    assert write(server, new).json()["status"] == "replaced"
    assert texts(server) == [new]
    assert texts(server, invalid="true") == [new, old]
    exported = server.client.get(f"{URL}/home/export")
    assert exported.headers["content-type"].startswith("application/x-ndjson")
    assert "memory-home.jsonl" in exported.headers["content-disposition"]
    lines = [json.loads(line) for line in exported.text.splitlines()]
    assert [(line["text"], line["invalidated_at"] is None) for line in lines] == [(old, False), (new, True)]
    assert lines[0]["superseded_by"] == lines[1]["id"]
    assert server.client.get(f"{URL}/empty/export").content == b""


def test_stores_are_apart_and_have_their_policies(server: Server) -> None:
    for word in ("alpha", "beta", "gamma", "delta"):
        write(server, word, store="notes")
    assert texts(server, store="notes") == ["delta", "gamma", "beta"]
    assert texts(server) == []


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/a.b", None, 400, "invalid_field"),
        ("GET", "/" + "x" * 65, None, 400, "invalid_field"),
        ("GET", "/%20", None, 400, "invalid_field"),
        ("GET", "/%00", None, 400, "invalid_field"),
        ("GET", "/home?limit=0", None, 400, "invalid_field"),
        ("GET", "/home?limit=1001", None, 400, "invalid_field"),
        ("GET", "/home?limit=²", None, 400, "invalid_field"),
        ("GET", "/home?limit=-1", None, 400, "invalid_field"),
        ("GET", "/home?invalid=1", None, 400, "invalid_field"),
        ("GET", "/home?q=" + "x" * 4001, None, 400, "invalid_field"),
        ("GET", "/home?before=fact-0", None, 404, "fact_not_found"),
        ("GET", "/home?store=nothing", None, 404, "memory_store_not_found"),
        ("GET", "/home?store=../x", None, 404, "memory_store_not_found"),
        ("GET", "/home/export?store=nothing", None, 404, "memory_store_not_found"),
        ("DELETE", "/home?store=nothing", None, 404, "memory_store_not_found"),
        ("DELETE", "/home/fact-0", None, 404, "fact_not_found"),
        ("POST", "/home", {}, 400, "invalid_field"),
        ("POST", "/home", {"text": 1}, 400, "invalid_field"),
        ("POST", "/home", {"text": ""}, 400, "invalid_field"),
        ("POST", "/home", {"text": " .\u0000\n"}, 400, "invalid_field"),
        ("POST", "/home", {"text": "x" * 1001}, 400, "invalid_field"),
        ("POST", "/home", {"text": "x" * 100_000}, 413, "body_too_large"),
        ("PUT", "/home", {"text": "x"}, 405, "method_not_allowed"),
    ],
)
def test_mistakes_are_named(
    server: Server, method: str, path: str, body: object, status: int, code: str
) -> None:
    response = server.client.request(method, URL + path, json=body)
    assert (response.status_code, response.json()["code"]) == (status, code)
    assert set(response.json()) == {"error", "code"}
    assert server.client.get(URL).json() == {"memories": []}


def test_odd_texts_are_kept_as_they_are(server: Server) -> None:
    for text in ("'; DROP TABLE facts; --", "<|im_end|></think>", "日本の京都に住んでいる", "🍵 \u202e"):
        assert write(server, text).status_code == 201
        assert texts(server, limit="1") == [text.strip()]


def test_many_write_at_once(server: Server) -> None:
    import asyncio

    async def write_all() -> list[int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            asked = [client.post(f"{URL}/home", json={"text": f"number {i} of all"}) for i in range(40)]
            return [response.status_code for response in await asyncio.gather(*asked)]

    assert asyncio.run(write_all()) == [201] * 40
    assert len(texts(server, invalid="true")) == 40


@pytest.fixture(scope="module")
def owned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[str, str]]]:
    path = tmp_path_factory.mktemp("owners") / "kiln.db"
    store = KeyStore(Database(path))
    secrets = {name: store.create(name)[1] for name in ("ana", "ben")}
    secrets["boss"] = store.create("boss", scope="admin")[1]
    with serving_model(settings(path, auth__anonymous=True)) as running:
        yield running, secrets


class TestOwners:
    def ask(
        self, owned: tuple[Server, dict[str, str]], name: str | None, method: str, path: str, **more: Any
    ) -> httpx.Response:
        server, secrets = owned
        headers = {} if name is None else {"authorization": f"Bearer {secrets[name]}"}
        return server.client.request(method, URL + path, headers=headers, **more)

    def test_everybody_has_their_own(self, owned: tuple[Server, dict[str, str]]) -> None:
        for name in ("ana", "ben", None):
            written = self.ask(owned, name, "POST", "/home", json={"text": f"I am {name}"})
            assert written.status_code == 201
        for name in ("ana", "ben", None):
            found = self.ask(owned, name, "GET", "/home").json()["facts"]
            assert [fact["text"] for fact in found] == [f"I am {name}"]
        theirs = self.ask(owned, "ana", "GET", "/home").json()["facts"][0]["id"]
        assert self.ask(owned, "ben", "DELETE", f"/home/{theirs}").status_code == 404

    def test_admins_see_others_and_nobody_else_does(self, owned: tuple[Server, dict[str, str]]) -> None:
        self.ask(owned, "ana", "POST", "/work", json={"text": "I am ana at work"})
        for name in ("ben", None):
            for method, path in (
                ("GET", "?owner=ana"),
                ("GET", "/work?owner=ana"),
                ("DELETE", "/work?owner=ana"),
            ):
                refused = self.ask(owned, name, method, path)
                assert (refused.status_code, refused.json()["code"]) == (403, "insufficient_scope")
        assert self.ask(owned, "ana", "GET", "/work?owner=ana").status_code == 200
        seen = self.ask(owned, "boss", "GET", "/work?owner=ana").json()["facts"]
        assert [fact["text"] for fact in seen] == ["I am ana at work"]
        assert self.ask(owned, "boss", "DELETE", "/work?owner=ana").json() == {"deleted": 1}
        assert self.ask(owned, "boss", "GET", "?owner=anonymous").status_code == 200


def test_facts_outlive_a_restart_and_memory_can_be_off(tmp_path: Path) -> None:
    path = tmp_path / "kiln.db"
    with serving_model(settings(path)) as running:
        assert write(running, "The user likes tea").status_code == 201
    with serving_model(settings(path)) as running:
        assert texts(running, q="tea") == ["The user likes tea"]
    with serving_model(settings(path, store__memory=False)) as running:
        refused = running.client.get(f"{URL}/home")
        assert (refused.status_code, refused.json()["code"]) == (403, "memory_off")


def test_a_store_that_fails_is_a_503(tmp_path: Path) -> None:
    path = tmp_path / "kiln.db"
    with serving_model(store__path=str(path)) as running:
        path.write_text("this is no database\n" * 100)
        for path_below in ("home", "home/export"):
            refused = running.client.get(f"{URL}/{path_below}")
            assert (refused.status_code, refused.json()["code"]) == (503, "store_failed")
        assert str(path) not in refused.text
        assert running.client.get("/health").status_code == 200
        # Who needs no key and no memory is served; an admin needs to be known as one.
        assert running.ask("3+8-2+7=?", max_tokens=2)["choices"]

        def is_no_admin() -> bool:
            scopes = running.client.get("/lmkit/v1/session").json()["scopes"]
            return bool(scopes == ["inference"])

        wait_until(is_no_admin, "nobody is taken for an admin")


def test_writers_that_wait_for_another_process_keep_no_reader_waiting(tmp_path: Path) -> None:
    path = tmp_path / "kiln.db"
    with serving_model(settings(path)) as running, ThreadPoolExecutor(4) as pool:
        write(running, "The user likes tea")
        # The server's own SQLite: locks of another library in the same process would not hold against it.
        with closing(apsw.Connection(str(path))) as other:
            other.execute("BEGIN IMMEDIATE")
            writes = [pool.submit(write, running, f"word {i}") for i in range(4)]
            try:
                # Each of the writers gives up after some seconds, one after the other.
                assert [texts(running) for _ in range(3)] == [["The user likes tea"]] * 3
                assert not any(future.done() for future in writes)
            finally:
                other.execute("ROLLBACK")
        assert {future.result().status_code for future in writes} == {201}
