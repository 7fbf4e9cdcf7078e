"""The store's file: made when needed, in order of its migrations, by one process or several."""

from __future__ import annotations

import stat
import subprocess
import sys
import threading
from pathlib import Path

import apsw
import pytest

from kiln.core.errors import StoreFailed
from kiln.store import migrations
from kiln.store.database import Database
from kiln.store.keys import KeyStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "kiln.db"


def version(path: Path) -> object:
    return apsw.Connection(str(path)).execute("PRAGMA user_version").get


def test_nothing_is_made_before_something_is_written(path: Path) -> None:
    store = KeyStore(Database(path))
    assert store.list() == []
    assert store.ring().keys == {}
    assert not path.parent.exists()
    store.create("ana")
    assert [key.name for key in store.list()] == ["ana"]


def test_nobody_else_may_read_it(path: Path) -> None:
    database = Database(path)
    KeyStore(database).create("ana")
    with database.read():
        files = [path, *path.parent.glob("kiln.db-*")]
        assert len(files) > 1
        for file in files:
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_commits_are_synced(path: Path) -> None:
    database = Database(path)
    with database.write() as connection:
        assert connection.execute("PRAGMA journal_mode").get == "wal"
        assert connection.execute("PRAGMA synchronous").get == 2


def test_an_error_undoes_the_whole_write(path: Path) -> None:
    database = Database(path)
    KeyStore(database).create("ana")
    with pytest.raises(ZeroDivisionError), database.write() as connection:
        connection.execute("DELETE FROM keys")
        raise ZeroDivisionError
    assert len(KeyStore(database).list()) == 1


def test_a_newer_schema_is_refused_and_left_alone(path: Path) -> None:
    KeyStore(Database(path)).create("ana")
    apsw.Connection(str(path)).execute("PRAGMA user_version=4711")
    with pytest.raises(StoreFailed) as caught:
        KeyStore(Database(path)).list()
    assert "schema 4711" in caught.value.message
    assert caught.value.hint is not None and "newer kiln" in caught.value.hint
    assert version(path) == 4711


def test_a_step_that_fails_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(connection: apsw.Connection) -> None:
        connection.execute("CREATE TABLE half (x)")
        connection.execute("CREATE TABLE keys (again)")

    KeyStore(Database(path)).create("ana")
    before = version(path)
    monkeypatch.setattr(migrations, "STEPS", [*migrations.STEPS, broken])
    with pytest.raises(StoreFailed):
        KeyStore(Database(path)).list()
    monkeypatch.undo()
    assert version(path) == before
    with Database(path).read() as connection:
        assert connection.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'half'").get == 0


def test_only_the_new_steps_are_taken(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    KeyStore(Database(path)).create("ana")

    def added(connection: apsw.Connection) -> None:
        connection.execute("CREATE TABLE added (x)")

    monkeypatch.setattr(migrations, "STEPS", [*migrations.STEPS, added])
    assert [key.name for key in KeyStore(Database(path)).list()] == ["ana"]
    assert version(path) == len(migrations.STEPS)


@pytest.mark.parametrize("content", [b"this is no database\n" * 100, b"SQLite format 3\0" + b"x" * 4096])
def test_another_file_is_named_and_left_alone(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(StoreFailed, match=str(path)):
        KeyStore(Database(path)).create("ana")
    assert path.read_bytes() == content


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreFailed) as caught:
        KeyStore(Database(tmp_path / "file" / "kiln.db")).create("ana")
    assert caught.value.hint is not None and "store.path" in caught.value.hint


def test_a_replaced_file_is_noticed(path: Path) -> None:
    store = KeyStore(Database(path))
    store.create("ana")
    for file in path.parent.glob("kiln.db*"):
        file.unlink()
    assert store.list() == []
    KeyStore(Database(path)).create("ben")
    assert [key.name for key in store.list()] == ["ben"]


def test_threads_write_at_once(path: Path) -> None:
    store = KeyStore(Database(path))
    threads = [threading.Thread(target=store.create, args=(f"k{i}",)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.list()) == 16


def test_processes_make_and_write_it_at_once(path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom kiln.store.database import Database\n"
        "from kiln.store.keys import KeyStore\nsys.stdin.readline()\n"
        "for i in range(5): KeyStore(Database(Path(sys.argv[1]))).create(f'{sys.argv[2]}-{i}')\n"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program, str(path), f"p{i}"], stdin=subprocess.PIPE)
        for i in range(4)
    ]
    for process in running:
        process.communicate(b"go\n", timeout=60)
    assert [process.returncode for process in running] == [0] * 4
    assert len(KeyStore(Database(path)).list()) == 20


def test_a_closed_store_says_so(path: Path) -> None:
    database = Database(path)
    KeyStore(database).create("ana")
    database.close()
    with pytest.raises(StoreFailed, match="closed"):
        KeyStore(database).list()
