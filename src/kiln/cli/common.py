"""What the commands share: flags that are settings, errors as plain lines, the model file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from kiln.backends.hub import Report, is_hub_reference, resolve_model
from kiln.cli.configuration import load_settings
from kiln.core.errors import ConfigError, SetupError, StoreFailed
from kiln.core.settings import Settings, declarations, show_value

# Parameter of a command -> the setting that it is.
FLAGS: Mapping[str, str] = {
    "model": "model.path",
    "adapter_dir": "model.adapter_dir",
    "host": "server.host",
    "port": "server.port",
    "threads": "engine.threads",
    "parallel": "engine.parallel",
    "ctx_size": "engine.ctx_size",
    "engine": "engine.mode",
    "log_level": "server.log_level",
    "default_thinking_budget_tokens": "server.default_thinking_budget_tokens",
    "default_thinking_budget_ms": "server.default_thinking_budget_ms",
    "served_model_id": "server.served_model_id",
}


def _flag(parameter: str, metavar: str) -> Any:
    # All flags are texts here: configuration.py parses them as it does environment values.
    declared = declarations()[FLAGS[parameter]]
    return typer.Option("--" + parameter.replace("_", "-"), metavar=metavar, help=declared.doc)


ModelFlag = Annotated[str | None, _flag("model", "PATH|HUBREF")]
AdapterDirFlag = Annotated[str | None, _flag("adapter_dir", "DIRECTORY")]
HostFlag = Annotated[str | None, _flag("host", "ADDRESS")]
PortFlag = Annotated[str | None, _flag("port", "N")]
ThreadsFlag = Annotated[str | None, _flag("threads", "N")]
ParallelFlag = Annotated[str | None, _flag("parallel", "N")]
CtxSizeFlag = Annotated[str | None, _flag("ctx_size", "TOKENS")]
EngineFlag = Annotated[str | None, _flag("engine", "process|inline")]
LogLevelFlag = Annotated[str | None, _flag("log_level", "debug|info|warning|error")]
BudgetTokensFlag = Annotated[str | None, _flag("default_thinking_budget_tokens", "N|unlimited")]
BudgetMsFlag = Annotated[str | None, _flag("default_thinking_budget_ms", "N|unlimited")]
ServedModelIdFlag = Annotated[str | None, _flag("served_model_id", "ID")]
ConfigFlag = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Settings file; else KILN_CONFIG, else ./kiln.toml."),
]


def settings_from(parameters: Mapping[str, Any]) -> Settings:
    """Settings with the flags among a command's parameters (`ctx.params`) on top."""
    flags = {key: parameters[name] for name, key in FLAGS.items() if name in parameters}
    return load_settings(config_path=parameters.get("config"), environment=os.environ, flags=flags)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn an error of the set-up or the store into one line, a hint and exit status 2."""
    try:
        yield
    except (SetupError, StoreFailed) as error:
        complain(error.message, error.hint)
        raise typer.Exit(2) from error


def complain(message: str, hint: str | None = None) -> None:
    print(f"kiln: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)


def notes() -> Console:
    """The console for progress: standard error, so that standard output can be piped."""
    return Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def with_model_file(settings: Settings, console: Console) -> Settings:
    """The settings with the model's reference replaced by a file that is there, downloaded if need be."""
    reference = settings.model.path
    if reference is None:
        return settings
    if is_hub_reference(reference):
        with download_progress(console, reference) as report:
            path = resolve_model(reference, progress=report)
    else:
        path = resolve_model(reference)
    return replace(settings, model=replace(settings.model, path=str(path)))


@contextmanager
def download_progress(console: Console, reference: str) -> Iterator[Report]:
    """A bar for each file on a terminal; elsewhere one line for each."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        console.print(f"looking up {reference}")

        def report(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
                if not console.is_terminal:
                    console.print(f"downloading {name}")
            bars.update(tasks[name], completed=done, total=total)

        yield report


def base_url(url: str) -> str:
    """The server's address without a path to the API; without a scheme it is http. Raises ConfigError."""
    url = url.rstrip("/").removesuffix("/v1")
    if url and "://" not in url:
        url = f"http://{url}"
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url is {show_value(url)}: it must begin with http:// or https://")
    return url
