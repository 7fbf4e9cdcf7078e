"""Models loaded on demand by a real server: the bundled file under other names, its own processes."""

from __future__ import annotations

import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

import kiln
from kiln.core.settings import CatalogModelSettings, Settings
from servers.server import PROMPT, serving_model, settings_of, wait_until

PIECE = 1024
BUNDLED = Path(kiln.__file__).parent / "models" / "tiny-reasoner-f16.gguf"


def settings(models: dict[str, CatalogModelSettings], **values: Any) -> Settings:
    return replace(settings_of(engine__ctx_size=512, engine__kv_size=1024, **values), models=models)


def small(path: Path | str = BUNDLED, **fields: Any) -> CatalogModelSettings:
    return CatalogModelSettings(path=str(path), ctx_size=256, kv_size=512, **fields)


@contextmanager
def serving(configured: Settings) -> Iterator[httpx.Client]:
    with serving_model(configured) as server:
        yield server.client


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "broken.gguf"
    path.write_bytes(BUNDLED.read_bytes()[:100_000])
    return path


@pytest.fixture(scope="module")
def client(broken: Path) -> Iterator[httpx.Client]:
    models = {
        "second": small(),
        "org/third": small(max_tokens=3, temperature=0.0),
        "broken": small(broken),
        "missing": small("/nowhere/model.gguf"),
    }
    with serving(settings(models)) as running:
        yield running


def ask(client: httpx.Client, model: str | None, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, **fields}
    return client.post("/v1/chat/completions", json=body if model is None else {"model": model, **body})


def states(client: httpx.Client) -> dict[str, str]:
    return {m["id"]: m["state"] for m in client.get("/lmkit/v1/models").json()["models"]}


def test_a_named_model_is_loaded_and_answers_as_itself(client: httpx.Client) -> None:
    listed = client.get("/lmkit/v1/models").json()["models"]
    assert [m["default"] for m in listed] == [True, False, False, False, False]
    assert {m["id"] for m in client.get("/v1/models").json()["data"]} == set(states(client))
    answer = ask(client, "second")
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "second"
    assert states(client)["second"] == "loaded"
    default = ask(client, None).json()
    assert default["choices"][0]["message"] == answer.json()["choices"][0]["message"]
    assert client.get("/v1/models/second").status_code == 200


def test_a_models_own_defaults_count(client: httpx.Client) -> None:
    body = {"model": "org/third", "messages": [{"role": "user", "content": PROMPT}]}
    first, second = (client.post("/v1/chat/completions", json=body).json() for _ in range(2))
    assert first["usage"]["completion_tokens"] == 3
    assert first["choices"] == second["choices"]


def test_every_route_takes_the_model_by_name(client: httpx.Client) -> None:
    batch = {"model": "second", "prompts": [[{"role": "user", "content": PROMPT}]], "max_tokens": 4}
    assert client.post("/v1/completions/batch", json=batch).json()["model"] == "second"
    scoring = {"model": "second", "prompt": "1+1=2", "max_tokens": 0, "prompt_logprobs": 1}
    answer = client.post("/v1/completions", json=scoring)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "second"


@pytest.mark.parametrize("name", ["broken", "missing"])
def test_a_model_that_cannot_be_loaded_leaves_the_others_serving(client: httpx.Client, name: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: ask(client, name), range(4)))
    assert [a.status_code for a in answers] == [503] * 4
    error = answers[0].json()["error"]
    assert (error["code"], error["param"]) == ("model_unavailable", "model")
    assert name in error["message"]
    assert states(client)[name] == "available"
    assert ask(client, None).status_code == 200


def test_an_unknown_model_is_404_and_loads_nothing(client: httpx.Client) -> None:
    before = states(client)
    error = ask(client, "nope").json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert states(client) == before


def test_models_make_room_for_each_other_and_lose_nothing() -> None:
    models = {"a": small(), "b": small()}
    # Room for the default model and one more.
    with serving(settings(models, model__memory_limit_mb=limit_mb(), engine__host_cache_mib=0)) as client:
        with ThreadPoolExecutor(8) as pool:
            names = ["a", "b", None, "a", "b", None, "a", "b"]
            answers = list(pool.map(lambda name: ask(client, name), names))
        assert [a.status_code for a in answers] == [200] * 8
        assert len({a.json()["choices"][0]["message"]["content"] for a in answers}) == 1
        assert sorted(states(client).values()) == ["available", "loaded", "loaded"]


def limit_mb() -> int:
    """Two and a half times what one small model takes."""
    with serving(settings({})) as client:
        facts = client.get("/v1/config").json()["resolved"]
    assert facts["models"] == {"tiny-reasoner": "loaded"}
    return round(2.5 * BUNDLED.stat().st_size / 1e6) + 1


class Hub:
    """A hub that sends a model's first half and then waits until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.broken_off = threading.Event()
        self.asked = threading.Event()
        content = BUNDLED.read_bytes()
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._headers()

            def do_GET(self) -> None:
                if self.path.startswith("/api/models/"):
                    files = [{"rfilename": "model.gguf", "size": len(content)}]
                    body = json.dumps({"id": "org/model", "sha": "a" * 40, "siblings": files}).encode()
                    self.send_response(200)
                    self.send_header("content-type", "application/json")
                    self.send_header("content-length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                    return
                self._headers()
                hub.asked.set()
                try:
                    sent = len(content) // 2
                    self.wfile.write(content[:sent])
                    while not hub.let_go.wait(0.05) and sent < len(content) - PIECE:
                        self.wfile.write(content[sent : sent + PIECE])
                        sent += PIECE
                    self.wfile.write(content[sent:])
                except OSError:
                    hub.broken_off.set()

            def _headers(self) -> None:
                self.send_response(200)
                self.send_header("content-length", str(len(content)))
                self.send_header("etag", '"' + "b" * 64 + '"')
                self.send_header("x-repo-commit", "a" * 40)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.let_go.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    # So that the download hears of what comes in as it would of a large file.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", PIECE)
    running = Hub()
    monkeypatch.setenv("HF_ENDPOINT", running.url)
    yield running
    running.close()
    shutil.rmtree(tmp_path, ignore_errors=True)


def test_a_model_of_a_hub_is_downloaded_and_a_disconnect_breaks_it_off(hub: Hub) -> None:
    with serving(settings({"far": small("org/model")})) as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post(
                "/v1/chat/completions",
                json={"model": "far", "messages": [{"role": "user", "content": PROMPT}]},
                timeout=1.5,
            )
        assert hub.asked.is_set()
        wait_until(hub.broken_off.is_set, "the download is broken off")
        wait_until(lambda: states(client)["far"] == "available", "the seat is free")
        hub.let_go.set()
        answer = ask(client, "far")
        assert answer.status_code == 200, answer.text
        assert states(client)["far"] == "loaded"
