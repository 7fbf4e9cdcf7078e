"""The commands around a server that is not there: what they hand on, print and end with."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType

import httpx
import pytest
from starlette.applications import Starlette
from typer.testing import CliRunner

import kiln.cli
from kiln.cli.common import base_url
from kiln.cli.embedded import embedded_server
from kiln.cli.main import app
from kiln.core.errors import ConfigError, ModelLoadError
from kiln.core.settings import Settings
from servers.process import served_by_process

from .scripted import Scripted

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture
def assembly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for the modules that name the engine and that serve."""
    module = ModuleType("kiln.cli.assembly")
    for name in ("assembly", "server"):
        monkeypatch.setitem(sys.modules, f"kiln.cli.{name}", module)
        monkeypatch.setattr(kiln.cli, name, module, raising=False)
    monkeypatch.chdir(tmp_path)
    return module


def test_serve_hands_on_the_settings_and_tells_when_ready(
    assembly: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Settings] = []

    def serve(settings: Settings, on_ready: Callable[[str, bool], None]) -> None:
        served.append(settings)
        on_ready("http://127.0.0.1:5", True)

    monkeypatch.setattr(assembly, "serve", serve, raising=False)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    flags = ["--model", "m.gguf", "--host", "0.0.0.0", "--port", "5", "--threads", "2", "--parallel", "3"]
    flags += ["--ctx-size", "512", "--log-level", "error", "--default-thinking-budget-tokens", "64"]
    flags += ["--default-thinking-budget-ms", "unlimited", "--served-model-id", "id"]
    result = CliRunner().invoke(app, ["serve", *flags])
    assert result.exit_code == 0, result.output
    settings = served[0]
    assert settings.model.path == "m.gguf"
    assert (settings.server.host, settings.server.port, settings.server.log_level) == ("0.0.0.0", 5, "error")
    assert (settings.engine.threads, settings.engine.parallel, settings.engine.ctx_size) == (2, 3, 512)
    assert settings.server.served_model_id == "id"
    assert settings.server.default_thinking_budget_tokens == 64
    assert "kiln serves m.gguf at http://127.0.0.1:5" in result.stdout
    assert "curl -s http://127.0.0.1:5/v1/chat/completions" in result.stdout
    assert "64 tokens and unlimited ms" in result.stdout
    assert "loading m.gguf" in result.stderr


def test_serve_ends_with_message_and_hint(assembly: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(settings: Settings, on_ready: Callable[[str, bool], None]) -> None:
        raise ModelLoadError("the file is no model", hint="Take another.")

    monkeypatch.setattr(assembly, "serve", serve, raising=False)
    result = CliRunner().invoke(app, ["serve"])
    assert result.exit_code == 2
    assert "kiln: the file is no model\nhint: Take another.\n" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://h:1/v1/", "http://h:1"),
        ("https://h", "https://h"),
        ("127.0.0.1:8420", "http://127.0.0.1:8420"),
        ("localhost:8420/v1", "http://localhost:8420"),
    ],
)
def test_an_address_may_leave_out_scheme_and_path(given: str, url: str) -> None:
    assert base_url(given) == url


@pytest.mark.parametrize("given", ["", "ftp://h:1"])
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="--url is"):
        base_url(given)


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_a_missing_model_is_named(assembly: ModuleType, command: str) -> None:
    result = CliRunner().invoke(app, [command, "--model", "absent.gguf"])
    assert result.exit_code == 2
    assert "kiln: there is no model file absent.gguf" in result.stderr


def test_the_embedded_server_answers_while_the_context_lasts(
    assembly: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "create_app", lambda settings: Scripted().app, raising=False)
    with embedded_server(Settings.default()) as url:
        assert httpx.get(f"{url}/state", trust_env=False).status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/state", trust_env=False)


def test_chat_starts_a_server_of_its_own(assembly: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Settings] = []

    def create_app(settings: Settings) -> Starlette:
        given.append(settings)
        return Scripted().app

    monkeypatch.setattr(assembly, "create_app", create_app, raising=False)
    monkeypatch.setenv("KILN_ENGINE_PARALLEL", "2")
    result = CliRunner().invoke(app, ["chat", "hello"])
    assert result.exit_code == 0, result.output
    assert result.stdout == "four\u2028\U0001f600\n"
    assert given[0].engine.parallel == 2


def test_what_the_start_of_the_embedded_server_raises_is_told(
    assembly: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        raise ModelLoadError("the file is no model", hint="Take another.")
        yield

    monkeypatch.setattr(assembly, "create_app", lambda settings: Starlette(lifespan=lifespan), raising=False)
    result = CliRunner().invoke(app, ["chat", "hello"])
    assert result.exit_code == 2
    assert result.stderr.endswith("kiln: the file is no model\nhint: Take another.\n")


def test_version_and_module() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "kiln", "--version"],
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.startswith("kiln ")
    assert ran.stderr == ""


@pytest.mark.parametrize("thinks", [True, False])
def test_the_start_offers_what_has_an_effect_on_the_model(tmp_path: Path, thinks: bool) -> None:
    (tmp_path / "plain.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    settings = {} if thinks else {"model__chat_template_file": "plain.jinja"}
    with served_by_process(tmp_path, **settings) as served:
        assert ("thinking_budget_tokens" in served.banner) is thinks
        assert ("budgets of thinking have no effect" in served.banner) is not thinks
        body = re.search(r"-d '(.*)'$", served.banner, re.MULTILINE)
        assert body is not None
        request = json.loads(body[1])
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=request, timeout=120, trust_env=False)
        assert answer.status_code == 200
        assert answer.json()["metadata"]["thinking_budget"]["applied"] is thinks
