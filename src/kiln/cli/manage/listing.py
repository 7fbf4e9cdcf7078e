"""What `kiln skills` and `kiln agents` share: a table of entries, and their faults with a place each."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import typer
from rich.console import Console
from rich.table import Table

from kiln.core.errors import ConfigError
from kiln.skills.files import Fault


class Entry(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def faults(self) -> tuple[Fault, ...]: ...


def folder_of(path: Path | None, configured: str | None, what: str) -> Path:
    """The folder to look at. Raises ConfigError where there is none."""
    if path is not None:
        if not path.is_dir():
            raise ConfigError(f"{path} is not a folder", hint=f"Name a folder of {what}.")
        return path
    if configured is None:
        raise ConfigError(f"no folder of {what}", hint=f"Name one, or set {what}.dir in the settings.")
    return Path(configured)


def show_rows(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on a terminal; elsewhere lines with tabs between."""
    if sys.stdout.isatty():
        table = Table(*columns)
        for row in rows:
            table.add_row(*map(plain, row))
        Console(highlight=False, markup=False).print(table)
    else:
        for row in rows:
            print("\t".join(map(plain, row)))


def invalid(entry: Entry) -> str:
    return f"invalid: {entry.faults[0]}"


def report(entries: Sequence[Entry], file: str, what: str) -> None:
    """One line a fault, `file` being the place of an entry's file with `{}` for its name, then a count.

    Raises typer.Exit(1) if there are faults.
    """
    for entry in entries:
        for fault in entry.faults:
            line = "" if fault.line is None else f":{fault.line}"
            print(plain(f"{file.format(entry.name)}{line}: {fault.message}"))
    wrong = sum(1 for entry in entries if entry.faults)
    print(f"{what}: {len(entries)}, with faults: {wrong}")
    if wrong:
        raise typer.Exit(1)


def plain(text: str) -> str:
    """What came from the disk, made fit for a terminal: names there may be any bytes."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
