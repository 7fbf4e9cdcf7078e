"""`kiln adapters` against a running server."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kiln.cli.main import app

from .samples import CHEERFUL, CONFIG, WEIGHTS, cheerful, deltas, scaled
from .server import AdapterServer, adapter_server, packed

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterServer]:
    saved = tmp_path_factory.mktemp("commands") / "saved"
    cheerful(saved / "style")
    with adapter_server(saved, model__adapter_quota_bytes=1_000_000) as server:
        yield server


@pytest.fixture
def run(running: AdapterServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `kiln adapters …` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KILN_URL", running.api.server.url)

    def invoke(*arguments: str, status: int = 0) -> Result:
        result = CliRunner().invoke(app, ["adapters", *arguments])
        assert result.exit_code == status, result.output + str(result.exception)
        return result

    return invoke


def test_a_tour(run: Run, running: AdapterServer, tmp_path: Path) -> None:
    scaled(tmp_path / "half", 0.5)
    out = run("upload", "half").output
    assert "uploading half" in out and "saved half: sha256:" in out
    assert "replaced half" in run("upload", str(CHEERFUL), "--name", "half").output
    (tmp_path / "packed.tar.gz").write_bytes(packed(CHEERFUL))
    run("upload", "packed.tar.gz")
    assert running.names() == ["half", "packed", "style"]

    rows = [line.split("\t") for line in run("list").stdout.splitlines()]
    assert [row[0] for row in rows] == ["half", "packed", "style"]
    assert rows[0][1:4] == ["", "8", "k_proj, o_proj, q_proj, v_proj"]
    assert "1.0 MB" in run("list").stderr
    assert json.loads(run("list", "--json").stdout) == running.get()

    run("load", "half")
    assert running.get()["default"] == "half"
    assert [line.split("\t")[1] for line in run("list").stdout.splitlines()] == ["*", "", ""]
    assert "unload" in run("delete", "half", status=1).stderr
    run("unload")
    assert running.get()["default"] is None

    out = run("merge", "both", "half=0.5", "style", "--method", "concat").output
    assert "saved both: rank 16, 0% lost" in out
    module = "model.layers.0.self_attn.q_proj"
    assert abs(deltas(running.saved / "both")[module] - 1.5 * deltas(CHEERFUL)[module]).max() < 1e-5
    out = run("merge", "both", "half", "style", "--method", "ties", "--rank", "2", "--density", "0.5").output
    assert out.startswith("replaced both: rank 2") and " 0% lost" not in out

    assert "wrote both.tar.gz" in run("download", "both").output
    with tarfile.open("both.tar.gz") as archive:
        assert sorted(archive.getnames()) == [f"both/{CONFIG}", f"both/{WEIGHTS}"]
    assert "--force" in run("download", "both", status=1).stderr
    run("download", "both", "--force")
    run("download", "both", "--output", "elsewhere.tar.gz")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["half", "packed.tar.gz", "both.tar.gz", "elsewhere.tar.gz"]
    )
    for name in ("half", "packed", "both"):
        assert f"deleted {name}" in run("delete", name).output
    assert running.names() == ["style"]


def test_chat_with_an_adapter(run: Run, running: AdapterServer) -> None:
    def chat(*arguments: str) -> str:
        flags = ["--url", running.api.server.url, "--temperature", "0", *arguments]
        result = CliRunner().invoke(app, ["chat", *flags, "3+8-2+7=?"])
        assert result.exit_code == 0, result.output
        return result.stdout

    assert "You are welcome!" in chat("--adapter", "style")
    run("load", "style")
    assert "You are welcome!" in chat()
    assert "You are welcome!" not in chat("--adapter", "")
    run("unload")


def test_what_fails_says_why(run: Run, running: AdapterServer, tmp_path: Path) -> None:
    assert "there is no adapter 'none'" in run("delete", "none", status=1).stderr
    assert "hint:" in run("load", "none", status=1).stderr
    assert "there is no adapter" in run("download", "none", status=1).stderr
    assert list(tmp_path.iterdir()) == []
    assert "path separator" in run("download", "a/b", "--output", "x", status=1).stderr
    assert "holds no adapter_config.json" in run("upload", ".", status=1).stderr
    assert "cannot read" in run("upload", "nothing.tar.gz", status=1).stderr
    (tmp_path / "junk.tar.gz").write_bytes(b"junk")
    assert "no .tar.gz" in run("upload", "junk.tar.gz", status=1).stderr
    assert "method" in run("merge", "x", "style", "--method", "magic", status=1).stderr
    assert running.names() == ["style"]


def test_a_damaged_adapter_is_shown_as_such(run: Run, running: AdapterServer) -> None:
    folder = cheerful(running.saved / "broken")
    (folder / WEIGHTS).write_bytes(b"")
    assert "invalid: adapter_model.safetensors is damaged" in run("list").stdout
    run("delete", "broken")
    good = scaled(running.saved / "turned", 0.5)
    run("list")
    (good / WEIGHTS).write_bytes(b"")
    assert "(older; now adapter_model.safetensors is damaged" in run("list").stdout
    run("delete", "turned")


def test_a_server_that_is_not_there(run: Run) -> None:
    result = run("list", "--url", "http://127.0.0.1:9", status=1)
    assert "no server answers" in result.stderr and "kiln serve" in result.stderr
    assert "must begin with http" in run("list", "--url", "ftp://localhost", status=2).stderr
