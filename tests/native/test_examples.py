"""The examples of the native chat run as they stand; what the small model says in them is its own affair."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from servers.server import serving_model

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "native"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server over the folders that the example's settings name."""
    configured = tomllib.loads((FOLDER / "kiln.toml").read_text(encoding="utf-8"))
    folders = {f"{name}__dir": str(ROOT / configured[name]["dir"]) for name in ("skills", "agents")}
    store = tmp_path_factory.mktemp("store") / "kiln.db"
    with serving_model(store__path=str(store), **folders) as server:
        yield server.url


@pytest.mark.parametrize("command", [["sh", "agent.sh"], [sys.executable, "agent.py"]])
def test_it_runs(url: str, command: list[str]) -> None:
    done = subprocess.run([*command, url], cwd=FOLDER, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "unit-price" in done.stdout
    assert "What the agent remembers:" in done.stdout
