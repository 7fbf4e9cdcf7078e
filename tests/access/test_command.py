"""`kiln keys`, and what `kiln serve` says when nobody could use it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kiln.cli.access import Access, store_path
from kiln.cli.main import app
from kiln.cli.serve import ready_text
from kiln.core.errors import ConfigError
from kiln.core.settings import AuthSettings, ServerSettings, Settings, StoreSettings
from kiln.store.database import Database
from kiln.store.keys import KeyStore, hash_secret


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "kiln.db"
    monkeypatch.setenv("KILN_STORE_PATH", str(path))
    monkeypatch.chdir(tmp_path)
    return path


def keys(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["keys", *arguments])
    assert "Traceback" not in result.output
    return result.exit_code, result.stdout, result.stderr


def test_from_creation_to_the_end(path: Path) -> None:
    status, out, err = keys("create", "ana", "--scope", "admin", "--max-concurrency", "3", "--rate", "60/min")
    assert status == 0 and "shown this once" in err
    secret = out.strip()
    store = KeyStore(Database(path))
    key = store.ring().keys[hash_secret(secret)]
    assert (key.name, key.scope, key.max_concurrency, key.rate_per_minute) == ("ana", "admin", 3, 60)
    status, out, _ = keys("list")
    assert status == 0
    assert out.split("\t")[:5] == ["ana", secret[:11] + "…", "admin", "3", "60"]
    assert secret not in out
    (shown,) = json.loads(keys("list", "--json")[1])
    assert (shown["name"], shown["revoked_at"]) == ("ana", None)
    assert keys("revoke", "ana")[:2] == (0, f"revoked ana ({secret[:11]}…)\n")
    assert store.ring().keys == {}
    assert json.loads(keys("list", "--json")[1])[0]["revoked_at"] is not None
    assert "earlier key ana" in keys("create", "ana")[2]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["create", "a b"], 2, "the name 'a b' is not allowed"),
        (["create", "ana", "--scope", "root"], 2, "--scope must be inference or admin, not 'root'"),
        (["create", "ana", "--rate", "fast"], 2, "--rate must be"),
        (["create", "ana", "--rate", "0"], 2, "rate_per_minute must be from 1"),
        (["create", "ana", "--max-concurrency", "-1"], 2, "max_concurrency must be from 1"),
        (["revoke", "ana"], 1, "no key named 'ana' is in force"),
    ],
)
def test_mistakes_are_named(path: Path, arguments: list[str], status: int, message: str) -> None:
    found, out, err = keys(*arguments)
    assert (found, out) == (status, "")
    assert err.startswith(f"kiln: {message}")
    assert not path.exists()


def test_a_file_that_is_no_store_is_named(path: Path) -> None:
    path.write_text("no database\n" * 100)
    for arguments in (["list"], ["create", "ana"], ["revoke", "ana"]):
        status, _, err = keys(*arguments)
        assert (status, err.splitlines()[0].startswith(f"kiln: the store {path}")) == (2, True)


def test_the_file_is_in_the_state_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert store_path(Settings()) == tmp_path / "kiln" / "kiln.db"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store_path(Settings()) == tmp_path / ".local" / "state" / "kiln" / "kiln.db"
    assert store_path(Settings(store=StoreSettings("x.db"))) == Path("x.db")


@pytest.mark.parametrize(
    ("host", "anonymous", "served"),
    [
        ("127.0.0.1", None, True),
        ("127.8.9.10", None, True),
        ("::1", None, True),
        ("localhost", None, True),
        ("0.0.0.0", None, False),
        ("::", None, False),
        ("kiln.example", None, False),
        ("127.0.0.1", False, False),
        ("0.0.0.0", True, True),
    ],
)
def test_who_needs_no_key(host: str, anonymous: bool | None, served: bool) -> None:
    settings = Settings(server=ServerSettings(host=host), auth=AuthSettings(anonymous=anonymous))
    assert settings.serves_anonymous is served
    text = ready_text("http://x", "m", settings)
    assert ("kiln keys create NAME" in text) is ("authorization: Bearer" in text) is not served


async def test_the_start_says_how_to_make_a_key(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(auth=AuthSettings(anonymous=False), store=StoreSettings(str(path)))
    for made in (False, True):
        caplog.clear()
        if made:
            KeyStore(Database(path)).create("ana")
        with caplog.at_level(logging.WARNING):
            access = Access(settings)
            await access.open()
            await access.policy.book.close()
        assert ("kiln keys create NAME" in caplog.text) is not made


async def test_a_store_that_cannot_be_read_stops_the_start(path: Path) -> None:
    path.write_text("no database\n" * 100)
    access = Access(replace(Settings(), store=StoreSettings(str(path))))
    with pytest.raises(ConfigError, match=str(path)):
        await access.open()
    await access.policy.book.close()
