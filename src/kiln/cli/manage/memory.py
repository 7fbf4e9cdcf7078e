"""`kiln memory`: look into what is remembered, delete it, take it along."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import typer

from kiln.cli.access import store_path
from kiln.cli.common import ConfigFlag, complain, plain_errors, settings_from
from kiln.core.access import ANONYMOUS
from kiln.core.wording import counted
from kiln.store.database import Database
from kiln.store.facts import Fact, MemoryKey
from kiln.store.memory import MemoryTables

memory = typer.Typer(
    name="memory",
    help="List, search, delete or export what is remembered.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

MemoryArgument = Annotated[str, typer.Argument(metavar="MEMORY", help="The id of a memory.")]
OwnerFlag = Annotated[
    str, typer.Option("--owner", metavar="NAME", help="Whose memory, by the name of the key.")
]
StoreFlag = Annotated[str, typer.Option("--store", metavar="NAME", help="The store that it lies under.")]
LimitFlag = Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Facts at most.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print lines of JSON.")]


@memory.command("list")
def list_facts(
    memory_id: Annotated[
        str | None, typer.Argument(metavar="MEMORY", help="The id of a memory; without it, all are listed.")
    ] = None,
    owner: OwnerFlag = "anonymous",
    store: StoreFlag = "default",
    limit: LimitFlag = 100,
    invalid: Annotated[bool, typer.Option("--invalid", help="Facts that hold no longer, too.")] = False,
    as_json: JsonFlag = False,
    config: ConfigFlag = None,
) -> None:
    """List memories, or the facts of one, newest first."""
    with plain_errors():
        tables = _tables(config)
        if memory_id is not None:
            _print(tables.facts(_key(owner, memory_id, store), limit=limit, invalid=invalid), as_json)
            return
        for found in tables.memories(_owner(owner)):
            print(
                json.dumps(asdict(found))
                if as_json
                else f"{found.memory}\t{found.store}\t{found.facts} facts"
            )


@memory.command()
def search(
    memory_id: MemoryArgument,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What the facts speak of.")],
    owner: OwnerFlag = "anonymous",
    store: StoreFlag = "default",
    limit: LimitFlag = 20,
    as_json: JsonFlag = False,
    config: ConfigFlag = None,
) -> None:
    """Search the facts of a memory by words, best first."""
    with plain_errors():
        _print(_tables(config).search(_key(owner, memory_id, store), text, limit), as_json)


@memory.command()
def delete(
    memory_id: MemoryArgument,
    facts: Annotated[list[str] | None, typer.Argument(metavar="[FACT]...", help="Ids of facts.")] = None,
    all_facts: Annotated[bool, typer.Option("--all", help="Delete all facts of the memory.")] = False,
    owner: OwnerFlag = "anonymous",
    store: StoreFlag = "default",
    config: ConfigFlag = None,
) -> None:
    """Delete facts of a memory for good. Exit status 1 if one was not there."""
    if all_facts == bool(facts):
        complain(
            "nothing is deleted: name the facts, or pass --all", "`kiln memory list MEMORY` shows their ids"
        )
        raise typer.Exit(2)
    with plain_errors():
        tables, key = _tables(config), _key(owner, memory_id, store)
        if all_facts:
            print(f"deleted {counted(tables.clear(key), 'fact')}")
            return
        missing = [fact for fact in facts or () if not tables.delete(key, fact)]
    print(f"deleted {counted(len(facts or ()) - len(missing), 'fact')}")
    if missing:
        complain(f"not in this memory: {', '.join(missing)}")
        raise typer.Exit(1)


@memory.command()
def export(
    memory_id: MemoryArgument,
    owner: OwnerFlag = "anonymous",
    store: StoreFlag = "default",
    config: ConfigFlag = None,
) -> None:
    """Print all facts of a memory as lines of JSON, oldest first, those that hold no longer too."""
    with plain_errors():
        for batch in _tables(config).export(_key(owner, memory_id, store)):
            _print(batch, as_json=True)


def _tables(config: ConfigFlag) -> MemoryTables:
    return MemoryTables(Database(store_path(settings_from({"config": config}))))


def _key(owner: str, memory_id: str, store: str) -> MemoryKey:
    return MemoryKey(_owner(owner), memory_id, store)


def _owner(name: str) -> str:
    return ANONYMOUS if name == "anonymous" else name


def _print(facts: Iterable[Fact], as_json: bool) -> None:
    for fact in facts:
        if as_json:
            sys.stdout.write(json.dumps(asdict(fact), ensure_ascii=False) + "\n")
        else:
            since = datetime.fromtimestamp(fact.created_at, UTC).strftime("%Y-%m-%d")
            ended = "" if fact.invalidated_at is None else "  (holds no longer)"
            print(f"{fact.id}  {since}  {fact.text}{ended}")
