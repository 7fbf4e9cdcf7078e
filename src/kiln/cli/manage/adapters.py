"""`kiln adapters`: LoRA adapters of a running server."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, Any, get_args

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from kiln.cli.common import base_url, complain, notes, plain_errors
from kiln.cli.manage.adapters_client import AdaptersClient, CommandFailed, Report, archive_of
from kiln.cli.manage.listing import plain, show_rows
from kiln.core.wording import counted
from kiln.wire.adapters import MergeMethod

adapters = typer.Typer(
    name="adapters",
    help="List, upload, merge or delete the LoRA adapters of a running server.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

UrlFlag = Annotated[str, typer.Option("--url", envvar="KILN_URL", help="The server's address.")]
KeyFlag = Annotated[
    str | None,
    typer.Option("--api-key", metavar="KEY", envvar="KILN_API_KEY", help="Sent as a bearer token."),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="An adapter of the server.")]
_METHODS = "|".join(get_args(MergeMethod))
LOCAL = "http://127.0.0.1:8420"
_COLUMNS = ("adapter", "default", "rank", "modules", "size", "modified", "content")


@adapters.command("list")
def list_adapters(
    as_json: Annotated[bool, typer.Option("--json", help="Print what the server sent.")] = False,
    url: UrlFlag = LOCAL,
    api_key: KeyFlag = None,
) -> None:
    """List the adapters: rank, modules, size, age, content hash."""
    with _server(url, api_key) as server:
        found = server.list()
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    show_rows(_COLUMNS, [_row(entry) for entry in found["data"]])
    disk = found["disk"]
    quota = "" if disk["quota_bytes"] is None else f" of {_size(disk['quota_bytes'])}"
    notes().print(f"{counted(len(found['data']), 'adapter')}, {_size(disk['used_bytes'])}{quota}")


@adapters.command()
def load(name: Name, url: UrlFlag = LOCAL, api_key: KeyFlag = None) -> None:
    """Make an adapter the server's default."""
    with _server(url, api_key) as server:
        server.load(name)
    print(f"{name} is what requests get that name no adapter")


@adapters.command()
def unload(url: UrlFlag = LOCAL, api_key: KeyFlag = None) -> None:
    """Make the base model the server's default."""
    with _server(url, api_key) as server:
        server.unload()
    print("the base model is what requests get that name no adapter")


@adapters.command()
def upload(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A folder that PEFT saved, or a .tar.gz.")],
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="What to call it; else PATH's own name.")
    ] = None,
    url: UrlFlag = LOCAL,
    api_key: KeyFlag = None,
) -> None:
    """Save an adapter on the server. One of the same name is replaced."""
    chosen = name if name is not None else path.resolve().name.removesuffix(".gz").removesuffix(".tar")
    with _server(url, api_key) as server, archive_of(path) as archive, _bar(f"uploading {chosen}") as report:
        saved = server.upload(chosen, archive, report)
    print(f"{_done(saved)} {chosen}: {saved['adapter']['content_sha256']}")


@adapters.command()
def download(
    name: Name,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Where to write it; else NAME.tar.gz.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    url: UrlFlag = LOCAL,
    api_key: KeyFlag = None,
) -> None:
    """Write an adapter to a .tar.gz."""
    target = output if output is not None else Path(f"{name}.tar.gz")
    with _server(url, api_key) as server, _new_file(target, force) as file:
        with _bar(f"downloading {name}") as report:
            server.download(name, file, report)
    print(f"wrote {target}")


@adapters.command()
def delete(name: Name, url: UrlFlag = LOCAL, api_key: KeyFlag = None) -> None:
    """Delete an adapter from the server."""
    with _server(url, api_key) as server:
        server.delete(name)
    print(f"deleted {name}")


@adapters.command()
def merge(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call the new adapter.")],
    parts: Annotated[
        list[str],
        typer.Argument(metavar="ADAPTER[=WEIGHT]...", help="What to merge; a weight is 1 unless stated."),
    ],
    method: Annotated[
        str, typer.Option("--method", metavar=_METHODS, help="How deltas are combined.")
    ] = "weighted_average",
    rank: Annotated[
        int | None,
        typer.Option("--rank", metavar="N", help="Rank of the result; else the largest of the parts'."),
    ] = None,
    density: Annotated[
        float | None,
        typer.Option("--density", metavar="X", help="Share of entries that ties keeps; else 0.2."),
    ] = None,
    url: UrlFlag = LOCAL,
    api_key: KeyFlag = None,
) -> None:
    """Merge adapters of the server into a new one. One of the same name is replaced."""
    body: dict[str, Any] = {"name": name, "method": method, "adapters": [_part(part) for part in parts]}
    body |= {key: value for key, value in (("rank", rank), ("density", density)) if value is not None}
    console = notes()
    with _server(url, api_key) as server, console.status(f"merging {len(parts)} adapters"):
        merged = server.merge(body)
    lost = merged["relative_error"]
    entry = merged["adapter"]
    done = _done(merged)
    print(f"{done} {name}: rank {entry['rank']}, {100 * lost:.3g}% lost, {entry['content_sha256']}")


@contextmanager
def _server(url: str, api_key: str | None) -> Iterator[AdaptersClient]:
    """A client; what fails becomes a line, a hint and exit status 1."""
    with plain_errors():
        client = AdaptersClient(base_url(url), api_key)
        try:
            yield client
        except CommandFailed as error:
            complain(plain(error.message), error.hint)
            raise typer.Exit(1) from None
        finally:
            client.close()


@contextmanager
def _bar(text: str) -> Iterator[Report]:
    """A bar on a terminal; elsewhere one line."""
    console = notes()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        if not console.is_terminal:
            console.print(text)
        task = bars.add_task(text, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextmanager
def _new_file(target: Path, force: bool) -> Iterator[IO[bytes]]:
    """A file that has its name only once it is whole."""
    if target.exists() and not force:
        raise CommandFailed(
            f"{target} is there already", "Replace it with --force, or name another --output."
        )
    part = target.with_name(f"{target.name}.part")
    try:
        with part.open("wb") as file:
            yield file
        os.replace(part, target)
    except OSError as error:
        raise CommandFailed(f"cannot write {target}: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)


def _done(saved: dict[str, Any]) -> str:
    return "replaced" if saved["replaced"] else "saved"


def _part(text: str) -> dict[str, Any]:
    name, separator, weight = text.rpartition("=")
    if not separator:
        return {"name": text}
    try:
        return {"name": name, "weight": float(weight)}
    except ValueError:
        return {"name": text}


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    default = "*" if entry["default"] else ""
    if "content_sha256" not in entry:
        return (entry["name"], default, "", f"invalid: {entry['problem']}", "", "", "")
    modules = entry["target_modules"]
    when = datetime.fromtimestamp(entry["modified"], UTC).strftime("%Y-%m-%d %H:%M UTC")
    content = entry["content_sha256"].removeprefix("sha256:")[:12]
    problem = "" if entry["problem"] is None else f" (older; now {entry['problem']})"
    return (
        entry["name"],
        default,
        str(entry["rank"]),
        ", ".join(modules) if modules is not None else "by expression",
        _size(entry["size_bytes"]),
        when,
        content + problem,
    )


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"
