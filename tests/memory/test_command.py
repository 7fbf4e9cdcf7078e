"""`kiln memory`"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kiln.cli.main import app
from kiln.core.settings import MemoryStoreSettings
from kiln.store.database import Database
from kiln.store.facts import MemoryKey, NewFact
from kiln.store.memory import MemoryTables


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MemoryTables:
    path = tmp_path / "kiln.db"
    monkeypatch.setenv("KILN_STORE_PATH", str(path))
    monkeypatch.chdir(tmp_path)
    return MemoryTables(Database(path))


def command(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["memory", *arguments])
    assert "Traceback" not in result.output
    return result.exit_code, result.stdout, result.stderr


def write(tables: MemoryTables, *texts: str, owner: str = "") -> list[str]:
    facts = [NewFact(text) for text in texts]
    return [
        w.fact.id for w in tables.write(MemoryKey(owner, "home", "default"), MemoryStoreSettings(), facts)
    ]


def test_before_there_is_anything(tables: MemoryTables) -> None:
    for arguments in (["list"], ["list", "home"], ["search", "home", "tea"], ["export", "home"]):
        assert command(*arguments) == (0, "", "")
    assert command("delete", "home", "--all")[:2] == (0, "deleted 0 facts\n")
    assert not tables.database.exists


def test_looking(tables: MemoryTables) -> None:
    tea, lunch = write(tables, "The user likes tea", "Lunch is at noon")
    write(tables, "I am ana", owner="ana")
    assert command("list")[1] == "home\tdefault\t2 facts\n"
    assert json.loads(command("list", "--json", "--owner", "ana")[1]) == {
        "memory": "home",
        "store": "default",
        "facts": 1,
    }
    lines = command("list", "home")[1].splitlines()
    assert [line.split("  ")[0] for line in lines] == [lunch, tea]
    assert lines[0].endswith("Lunch is at noon")
    assert command("search", "home", "about tea", "--json")[1].count("\n") == 1
    assert [json.loads(line)["id"] for line in command("export", "home")[1].splitlines()] == [tea, lunch]
    assert "I am ana" in command("list", "home", "--owner", "ana")[1]


def test_deleting(tables: MemoryTables) -> None:
    tea, lunch, _ = write(tables, "The user likes tea", "Lunch is at noon", "Tuesdays are busy")
    status, out, err = command("delete", "home", tea, "fact-0")
    assert (status, out) == (1, "deleted 1 fact\n") and "fact-0" in err
    assert command("delete", "home", lunch)[0] == 0
    assert command("delete", "home")[0] == 2
    assert command("delete", "home", lunch, "--all")[0] == 2
    assert command("delete", "home", "--all")[1] == "deleted 1 fact\n"
    assert command("list")[1] == ""


def test_what_holds_no_longer_is_marked(tables: MemoryTables) -> None:
    write(tables, "The user works in the engine team of a firm in Berlin")
    write(tables, "The user works in the engine team of a firm in Bremen")
    assert "Berlin" not in command("list", "home")[1]
    assert command("list", "home", "--invalid")[1].rstrip().endswith("Berlin  (holds no longer)")
