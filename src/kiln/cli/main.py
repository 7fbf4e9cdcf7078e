"""The `kiln` command."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from kiln.cli.bench import bench
from kiln.cli.chat.command import chat
from kiln.cli.config import config
from kiln.cli.contracts import contracts
from kiln.cli.manage.adapters import adapters
from kiln.cli.manage.agents import agents
from kiln.cli.manage.keys import keys
from kiln.cli.manage.memory import memory
from kiln.cli.manage.skills import skills
from kiln.cli.serve import serve

app = typer.Typer(
    name="kiln",
    help="Serve open reasoning models whose thinking can be budgeted, watched and cut short.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain help: the tables of the rich one cut the flags at 80 columns.
    rich_markup_mode=None,
)
for command in (serve, config, chat, bench):
    app.command()(command)
app.add_typer(contracts)
app.add_typer(skills)
app.add_typer(keys)
app.add_typer(memory)
app.add_typer(adapters)
app.add_typer(agents)


def _show_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"kiln {version('kiln')}")
        except PackageNotFoundError:  # run from a source tree that was never installed
            typer.echo("kiln (not installed)")
        raise typer.Exit()


@app.callback()
def _main(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


if __name__ == "__main__":
    app(prog_name="kiln")
