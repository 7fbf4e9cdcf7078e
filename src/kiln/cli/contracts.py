"""`kiln contracts`: list and print the wire contracts, and hold the program against them."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from kiln import contracts as data
from kiln.cli.common import complain
from kiln.http.openapi import agreement

contracts = typer.Typer(
    name="contracts",
    help="List, print or check the wire contracts.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@contracts.command("list")
def list_contracts() -> None:
    """List the contracts: name and title."""
    width = max(len(name) for name in data.names())
    for name in data.names():
        print(f"{name:{width}}  {json.loads(data.load(name)).get('title', '')}")


@contracts.command("print")
def print_contract(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name that `kiln contracts list` shows.")],
) -> None:
    """Print one contract."""
    try:
        content = data.load(name)
    except KeyError:
        complain(f"no contract {name!r}", f"the contracts are {', '.join(data.names())}")
        raise typer.Exit(2) from None
    sys.stdout.write(content.decode("utf-8"))


@contracts.command("check")
def check_contracts() -> None:
    """Compare every definition with the struct that stands for it. Exit status 1 on a difference."""
    found = agreement.check()
    for definition, differences in found.items():
        print(f"{definition}: {'differs' if differences else f'agrees with {struct_of(definition)}'}")
        for difference in differences:
            print(f"    {difference}")
    wrong = sum(1 for differences in found.values() if differences)
    print(f"{len(found)} definitions, {wrong} differ")
    if wrong:
        raise typer.Exit(1)


def struct_of(definition: str) -> str:
    """What stands for a definition, in words."""
    if definition == "serverDefaults":
        return "the settings"
    if definition == "request":
        return "ChatCompletionRequest and BatchCompletionRequest"
    kind = agreement.type_of(definition)
    return kind.__name__ if definition in agreement.definitions_with_struct() else "its type"
