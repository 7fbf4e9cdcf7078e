"""Kept children: one answers again and again, one that breaks its bounds is gone and replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kiln
from kiln.confine.kept import KeptBounds, KeptChildren, OutOfPatience, Unstartable
from kiln.confine.run import ConfinedError, TookTooLong, TookTooMuchMemory

BOUNDS = KeptBounds(cpu_seconds=0.5, wall_seconds=60, memory_bytes=2**29)


@pytest.fixture(autouse=True)
def work_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parent
    source = Path(kiln.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(source), str(root)]))


@pytest.fixture
def children(work_is_found: None) -> Iterator[KeptChildren]:
    kept = KeptChildren("work:kept", b"as it was set", BOUNDS)
    yield kept
    kept.close()


def pid_of(children: KeptChildren) -> int:
    return int(children.run(b"pid"))


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not Path(f"/proc/{pid}").exists()


def test_one_child_answers_again_and_again(children: KeptChildren) -> None:
    first = pid_of(children)
    assert children.run(b"echo " + b"abc" * 100_000) == b"cba" * 100_000
    assert children.run(b"echo ") == b""
    assert children.run(b"setting") == b"as it was set"
    assert pid_of(children) == first


def test_native_code_that_does_not_end_is_ended(children: KeptChildren) -> None:
    before = pid_of(children)
    with pytest.raises(TookTooLong) as caught:
        children.run(b"spin")
    assert not isinstance(caught.value, OutOfPatience), "processor time counts, not the clock"
    assert is_gone(before)
    assert pid_of(children) != before


def test_the_time_is_that_of_one_payload(children: KeptChildren) -> None:
    """A child does not age: many short works together may take longer than one may."""
    first = pid_of(children)
    for _ in range(12):
        children.run(b"swell 4000000")
    assert pid_of(children) == first


def test_one_that_waits_is_ended_by_the_clock(work_is_found: None, tmp_path: Path) -> None:
    children = KeptChildren("work:kept", b"", KeptBounds(0.5, 2.0, 2**29))
    mark = tmp_path / "pid"
    with pytest.raises(OutOfPatience):
        children.run(b"hang " + os.fsencode(mark))
    assert is_gone(int(os.readlink(mark)))
    children.close()


@pytest.mark.parametrize("work", [b"hog 1000000000", b"crash"])
def test_memory_is_bounded(children: KeptChildren, work: bytes) -> None:
    """Python says so; native code aborts."""
    before = pid_of(children)
    with pytest.raises(TookTooMuchMemory, match="512 MiB"):
        children.run(work)
    assert is_gone(before)
    assert children.run(b"echo ab") == b"ba"


def test_one_that_has_grown_answers_and_is_replaced(children: KeptChildren) -> None:
    before = pid_of(children)
    assert children.run(b"swell 10000000") == b"10000000"
    assert pid_of(children) == before
    assert children.run(b"keep 250000000") == b"kept"
    assert is_gone(before)
    assert pid_of(children) != before


def test_a_failure_tells_its_kind_only(children: KeptChildren) -> None:
    with pytest.raises(ConfinedError) as caught:
        children.run(b"complain")
    assert str(caught.value) == "it failed (LookupError)"
    with pytest.raises(ConfinedError, match="ended the process"):
        children.run(b"fault")
    assert children.run(b"echo ab") == b"ba"


def test_one_that_cannot_work_is_no_fault_of_the_payload(children: KeptChildren) -> None:
    with pytest.raises(Unstartable, match="status 1"):
        children.run(b"die")
    nowhere = KeptChildren("no_such_module:work", b"", BOUNDS)
    with pytest.raises(Unstartable):
        nowhere.run(b"")
    nowhere.close()


def test_one_that_was_killed_while_idle_costs_nobody_an_answer(children: KeptChildren) -> None:
    before = pid_of(children)
    os.kill(before, signal.SIGKILL)
    assert children.run(b"echo ab") == b"ba"
    assert pid_of(children) != before


def test_callers_at_one_time_have_a_child_each(children: KeptChildren) -> None:
    with ThreadPoolExecutor(3) as pool:
        slow = pool.submit(children.run, b"spin")
        others = [pool.submit(children.run, b"echo %d" % at) for at in range(10, 30)]
        assert [other.result() for other in others] == [str(at)[::-1].encode() for at in range(10, 30)]
        with pytest.raises(TookTooLong):
            slow.result()


def test_nothing_is_left_when_they_are_closed(children: KeptChildren, tmp_path: Path) -> None:
    idle, mark = pid_of(children), tmp_path / "pid"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(children.run, b"hang " + os.fsencode(mark))
        while not mark.is_symlink():
            time.sleep(0.01)
        children.close()
        with pytest.raises(ConfinedError):
            waiting.result()
    assert is_gone(idle) and is_gone(int(os.readlink(mark)))


PARENT = """
import sys, time
from kiln.confine.kept import KeptBounds, KeptChildren
children = KeptChildren("work:kept", b"", KeptBounds(0.5, 60, 2**29))
print(children.run(b"pid").decode(), flush=True)
time.sleep(600)
"""


def test_a_child_ends_with_its_parent(work_is_found: None) -> None:
    """Also when the parent is killed: its end of the pipe is gone."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    assert is_gone(pid)
