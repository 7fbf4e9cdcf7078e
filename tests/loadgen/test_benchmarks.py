"""`python -m bench`: its names, its help, and what the documents say of both."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")


def run_bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def usage() -> str:
    result = run_bench("--help")
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


@pytest.fixture(scope="module")
def names(usage: str) -> set[str]:
    listed = re.findall(r"^  ([a-z-]+)  +\S", usage.split("benchmarks:")[1], re.MULTILINE)
    return set(listed)


def test_every_benchmark_of_the_documents_is_known(names: set[str]) -> None:
    table = re.findall(r"^\| `([\w-]+)`", DOCUMENT.split("## kiln alone")[1], re.MULTILINE)
    assert table
    commands = [
        name
        for path in [*(ROOT / "docs").glob("*.md"), *(ROOT / "bench").glob("*.py")]
        for name in re.findall(r"python -m bench ([a-z][\w-]*)", path.read_text(encoding="utf-8"))
    ]
    assert {*table, *commands} - {"name"} <= names


def test_every_benchmark_is_a_module_with_a_main(names: set[str]) -> None:
    modules = {path.stem.replace("_", "-"): path.read_text() for path in (ROOT / "bench").glob("*.py")}
    runnable = {name for name, text in modules.items() if "\ndef main(" in text}
    # The curve writes into a model card, the host is another benchmark's child.
    assert names == runnable - {"--main--", "curve", "paced-host"}


def test_every_variable_is_in_the_help_and_the_document(usage: str) -> None:
    used = {
        name
        for path in (ROOT / "bench").glob("*.py")
        for name in re.findall(r'"(KILN_BENCH_[A-Z]+)"', path.read_text(encoding="utf-8"))
    }
    assert used and used == set(re.findall(r"KILN_BENCH_[A-Z]+", usage))
    assert used == set(re.findall(r"KILN_BENCH_[A-Z]+", DOCUMENT))


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (("second_turn",), {}, "no benchmark second_turn; there are: budget-cost"),
        (("standing",), {"KILN_BENCH_ROUNDS": "0"}, "KILN_BENCH_ROUNDS is '0'"),
        (("standing",), {"KILN_BENCH_ONLY": "no such"}, "there are: 1 stream, greedy"),
    ],
)
def test_what_is_unknown_is_named(
    arguments: tuple[str, ...], environment: dict[str, str], words: str
) -> None:
    result = run_bench(*arguments, **environment)
    assert result.returncode != 0
    assert words in result.stderr and "Traceback" not in result.stderr


def test_the_peers_command_listens_where_kiln_looks_for_it() -> None:
    peer = re.search(r"llama-server -m [^`\n]*", DOCUMENT)
    looked_for = re.search(r"KILN_BENCH_PEER=\S+:(\d+)", DOCUMENT)
    assert peer is not None and looked_for is not None
    assert f"--port {looked_for[1]}" in peer[0]
    assert "OMP_WAIT_POLICY=passive " in DOCUMENT[: peer.start()].splitlines()[-1]
