"""The example script against a real server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .api import Api

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "rollout.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60
    )


def test_a_rollout_is_scored_again(api: Api) -> None:
    done = run(api.server.url)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("largest difference: ")
    assert float(lines[-1].split()[-1]) <= 1e-6
    table = [line.split() for line in lines[3:-1]]
    sources = [row[-3] for row in table]
    assert sources.count("forced") == 1
    assert sources[:12] == ["sampled"] * 12
    assert sources[12] == "forced"


def test_without_a_server() -> None:
    done = run("http://127.0.0.1:9")
    assert done.returncode != 0
    assert "kiln serve" in done.stderr
    assert "Traceback" not in done.stderr
