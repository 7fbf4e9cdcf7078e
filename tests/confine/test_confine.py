"""A confined child: its result, its bounds, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

import kiln
from kiln.confine.run import Bounds, ConfinedError, TookTooLong, TookTooMuchMemory, run_confined

BOUNDS = Bounds(timeout_s=60, memory_bytes=2**29, output_bytes=2**20)


@pytest.fixture(autouse=True)
def work_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parent
    source = Path(kiln.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(source), str(root)]))


async def run(name: str, payload: bytes, bounds: Bounds = BOUNDS) -> bytes:
    return await run_confined(f"work:{name}", payload, bounds)


async def test_a_result_comes_back() -> None:
    assert await run("echo", b"abc" * 100_000) == b"cba" * 100_000
    assert await run("echo", b"") == b""


async def test_the_servers_secrets_stay_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hush")
    names = json.loads(await run("environment", b""))
    assert "PYTHONPATH" in names
    assert "SECRET_KEY" not in names


async def test_one_that_hangs_is_killed(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    task = asyncio.create_task(run("hang", os.fsencode(mark)))
    while not mark.is_symlink():
        await asyncio.sleep(0.01)
    pid = int(os.readlink(mark))
    assert Path(f"/proc/{pid}").exists()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not Path(f"/proc/{pid}").exists()


async def test_time_is_bounded(tmp_path: Path) -> None:
    bounds = Bounds(timeout_s=0.5, memory_bytes=2**29, output_bytes=100)
    with pytest.raises(TookTooLong, match="longer than 0.5 seconds"):
        await run("hang", os.fsencode(tmp_path / "pid"), bounds)


async def test_memory_is_bounded() -> None:
    with pytest.raises(TookTooMuchMemory, match="bytes of memory"):
        await run("hog", str(2**31).encode())


async def test_output_is_bounded() -> None:
    with pytest.raises(ConfinedError, match="more than 1048576 bytes"):
        await run("flood", b"")
    assert len(await run("hog", str(2**20).encode())) == 2**20
    with pytest.raises(ConfinedError, match="more than 1048576 bytes"):
        await run("hog", str(2**20 + 1).encode())


async def test_one_that_dies_or_raises_is_an_error_without_details() -> None:
    with pytest.raises(ConfinedError, match="ended the process"):
        await run("die", b"x" * 10_000_000)
    with pytest.raises(ConfinedError, match=r"\(LookupError\)"):
        await run("complain", b"")
    with pytest.raises(ConfinedError, match="ended the process"):
        await run("absent", b"")


async def test_no_file_is_written(tmp_path: Path) -> None:
    target = tmp_path / "file"
    with pytest.raises(ConfinedError):
        await run("write", os.fsencode(target))
    assert not target.exists() or target.stat().st_size == 0
