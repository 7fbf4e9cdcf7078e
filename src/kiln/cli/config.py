"""`kiln config`: the resolved settings, each with its source."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kiln.cli.common import (
    AdapterDirFlag,
    BudgetMsFlag,
    BudgetTokensFlag,
    ConfigFlag,
    CtxSizeFlag,
    EngineFlag,
    HostFlag,
    LogLevelFlag,
    ModelFlag,
    ParallelFlag,
    PortFlag,
    ServedModelIdFlag,
    ThreadsFlag,
    plain_errors,
    settings_from,
)
from kiln.cli.configuration import find_config_file
from kiln.core.settings import Declaration, Settings, declarations, settings_as_json, tables_as_json


def config(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    model: ModelFlag = None,
    adapter_dir: AdapterDirFlag = None,
    host: HostFlag = None,
    port: PortFlag = None,
    threads: ThreadsFlag = None,
    parallel: ParallelFlag = None,
    ctx_size: CtxSizeFlag = None,
    config: ConfigFlag = None,
    engine: EngineFlag = None,
    log_level: LogLevelFlag = None,
    default_thinking_budget_tokens: BudgetTokensFlag = None,
    default_thinking_budget_ms: BudgetMsFlag = None,
    served_model_id: ServedModelIdFlag = None,
) -> None:
    """Show the settings that `kiln serve` would use with the same flags, and where each comes from."""
    with plain_errors():
        settings = settings_from(ctx.params)
        if as_json:
            shown = settings_as_json(settings) | tables_as_json(settings)
            print(json.dumps(shown, indent=2, ensure_ascii=False))
            return
        file = find_config_file(config, os.environ)
        print(f"settings file: {file or 'none'}")
        if sys.stdout.isatty():
            Console(highlight=False, markup=False).print(as_table(settings))
        else:
            print(as_lines(settings))


def as_table(settings: Settings) -> Table:
    table = Table("setting", "value", "source")
    for name, declaration in declarations().items():
        source = settings.sources[name]
        style = None if source == "default" else "bold"
        table.add_row(name, show(declaration, settings.get(name)), source, style=style)
    for name, value in table_rows(settings):
        table.add_row(name, value, "file", style="bold")
    return table


def as_lines(settings: Settings) -> str:
    """The same for a pipe: `server.port = 8420 (default)`."""
    lines = [
        f"{name} = {show(declaration, settings.get(name))} ({settings.sources[name]})"
        for name, declaration in declarations().items()
    ]
    return "\n".join([*lines, *(f"{name} = {value} (file)" for name, value in table_rows(settings))])


def table_rows(settings: Settings) -> list[tuple[str, str]]:
    """What the named tables of the file set, as `mcp.files.command` and the value."""
    return [
        (f"{family}.{name}.{key}", show_plain(value))
        for family, tables in tables_as_json(settings).items()
        for name, table in tables.items()
        for key, value in table.items()
    ]


def show(declaration: Declaration, value: object) -> str:
    if value is None:
        return "unlimited" if declaration.unlimited else "unset"
    return show_plain(value)


def show_plain(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(value) if value else "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
