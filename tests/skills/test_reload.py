"""When a file is read again, and when it is not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kiln.skills.files import Fault, Faulty, Signature
from kiln.skills.reload import Reloading


class Loader:
    """Reads a text, and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, path: Path) -> tuple[str | Faulty, Signature]:
        self.count += 1
        text = path.read_text()
        return (Faulty(Fault(text)) if text == "bad" else text), Signature.of(path.stat())


def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let some time have passed since the files were written."""
    now = time.time_ns()
    monkeypatch.setattr("kiln.skills.reload.time.time_ns", lambda: now + 10**9)


def test_what_was_written_just_now_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another write in the same tick of the file system's clock would leave the same signature."""
    path = tmp_path / "file"
    path.write_text("one")
    monkeypatch.setattr("kiln.skills.reload.time.time_ns", lambda: path.stat().st_mtime_ns)
    load = Loader()
    reloading = Reloading(load)
    assert [reloading.get(path) for _ in range(3)] == ["one"] * 3
    assert load.count == 3
    later(monkeypatch)
    assert [reloading.get(path) for _ in range(3)] == ["one"] * 3
    assert load.count == 4


def test_a_fault_is_kept_like_a_value_and_raised_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("bad")
    later(monkeypatch)
    load = Loader()
    reloading = Reloading(load)
    raised = []
    for _ in range(2):
        with pytest.raises(Faulty, match="bad") as caught:
            reloading.get(path)
        raised.append(caught.value)
    assert load.count == 1
    # An exception gathers the stack of each raise: it is not shared between callers.
    assert raised[0] is not raised[1]


def test_a_file_that_went_and_came_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("one")
    later(monkeypatch)
    reloading = Reloading(Loader())
    assert reloading.get(path) == "one"
    path.unlink()
    with pytest.raises(FileNotFoundError):
        reloading.get(path)
    path.write_text("two")
    assert reloading.get(path) == "two"
