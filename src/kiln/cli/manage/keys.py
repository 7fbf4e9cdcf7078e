"""`kiln keys`: API keys."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, cast, get_args

import typer
from rich.console import Console
from rich.table import Table

from kiln.cli.access import store_path
from kiln.cli.common import ConfigFlag, complain, plain_errors, settings_from
from kiln.core.errors import KeyNotFound, KeyRefused
from kiln.store.database import Database
from kiln.store.keys import Key, KeyStore, Scope

keys = typer.Typer(
    name="keys", help="Create, list or revoke API keys.", no_args_is_help=True, rich_markup_mode=None
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is; memory belongs to this name.")]


@keys.command()
def create(
    name: Name,
    scope: Annotated[
        str, typer.Option("--scope", metavar="inference|admin", help="What the key may do.")
    ] = "inference",
    max_concurrency: Annotated[
        int | None, typer.Option("--max-concurrency", metavar="N", help="Requests under way at once.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option("--rate", metavar="N/min", help="Requests begun in a minute.")
    ] = None,
    config: ConfigFlag = None,
) -> None:
    """Create a key and print it. It is stored as a hash, so it is shown this once."""
    with plain_errors():
        store = _store(config)
        before = any(key.name == name for key in store.list())
        try:
            key, secret = store.create(
                name, scope=_scope(scope), max_concurrency=max_concurrency, rate_per_minute=_rate(rate)
            )
        except KeyRefused as error:
            complain(error.message, error.hint)
            raise typer.Exit(2) from None
    print(secret)
    print(f"This key of scope {key.scope} is shown this once; it is in force at once.", file=sys.stderr)
    if before:
        print(f"What was remembered for an earlier key {name} is now this key's.", file=sys.stderr)


@keys.command("list")
def list_keys(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False, config: ConfigFlag = None
) -> None:
    """List all keys, revoked ones too."""
    with plain_errors():
        found = _store(config).list()
    if as_json:
        print(json.dumps([asdict(key) for key in found], indent=2))
    elif sys.stdout.isatty():
        table = Table(*_HEADINGS)
        for key in found:
            table.add_row(*_cells(key), style="dim" if key.revoked_at is not None else None)
        Console(highlight=False, markup=False).print(table)
    else:
        for key in found:
            print("\t".join(_cells(key)))


@keys.command()
def revoke(name: Name, config: ConfigFlag = None) -> None:
    """End a key and its browser sessions. Running servers know it within a second."""
    with plain_errors():
        try:
            key = _store(config).revoke(name)
        except KeyNotFound as error:
            complain(error.message, error.hint)
            raise typer.Exit(1) from None
    print(f"revoked {key.name} ({key.prefix}…)")


_HEADINGS = ("name", "key", "scope", "at once", "a minute", "created", "last used", "revoked")


def _cells(key: Key) -> list[str]:
    limits = [str(n) if n is not None else "-" for n in (key.max_concurrency, key.rate_per_minute)]
    times = [_time(t) for t in (key.created_at, key.last_used_at, key.revoked_at)]
    return [key.name, f"{key.prefix}…", key.scope, *limits, *times]


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _store(config: ConfigFlag) -> KeyStore:
    return KeyStore(Database(store_path(settings_from({"config": config}))))


def _scope(text: str) -> Scope:
    if text in get_args(Scope):
        return cast(Scope, text)
    raise KeyRefused(f"--scope must be inference or admin, not {text!r}", param="scope")


def _rate(text: str | None) -> int | None:
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,9})(/min)?", text)
    if match is None:
        raise KeyRefused(
            f"--rate must be a number of requests a minute, as 60/min, not {text!r}", param="rate"
        )
    return int(match[1])
