"""The example script against a real server."""

from __future__ import annotations

import subprocess
from pathlib import Path

from .samples import ROOT, write
from .server import AdapterServer

SCRIPT = ROOT / "examples" / "adapters.sh"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60)


def test_it_uploads_composes_downloads_and_deletes(server: AdapterServer) -> None:
    before = server.names()
    done = run(server.api.server.url)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    answers = [line for line in lines if " is 16." in line]
    styled = "It is 16. You are welcome!"
    assert answers == ["The answer is 16.", styled, styled, styled]
    assert sum('"deleted":true' in line for line in lines) == 2
    assert any(line.endswith("/adapter_model.safetensors") for line in lines)
    assert server.names() == before


def test_it_stops_where_the_server_refuses(server: AdapterServer, tmp_path: Path) -> None:
    done = run(server.api.server.url, str(write(tmp_path / "empty", {})))
    assert done.returncode != 0
    assert "invalid_adapter" in done.stdout + done.stderr
    assert "deleted" not in done.stdout
