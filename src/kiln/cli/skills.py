"""`kiln skills`: what the skills folder holds, and what is wrong with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kiln.cli.common import ConfigFlag, plain_errors, settings_from
from kiln.core.errors import ConfigError
from kiln.skills.library import SkillEntry, SkillLibrary, check
from kiln.skills.skill import FILE_NAME

skills = typer.Typer(
    name="skills",
    help="List or check the skills that requests may use.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

PathArgument = Annotated[
    Path | None,
    typer.Argument(metavar="PATH", help="A folder of skills, or of one skill; else the setting skills.dir."),
]


@skills.command("list")
def list_skills(ctx: typer.Context, path: PathArgument = None, config: ConfigFlag = None) -> None:
    """List the skills: name, questions, description; or that a skill is invalid."""
    with plain_errors():
        entries = _entries(ctx, path)
    if sys.stdout.isatty():
        table = Table("skill", "questions", "description")
        for entry in entries:
            table.add_row(*_row(entry), style=None if entry.skill else "red")
        Console(highlight=False, markup=False).print(table)
    else:
        for entry in entries:
            print("\t".join(_row(entry)))


@skills.command("check")
def check_skills(ctx: typer.Context, path: PathArgument = None, config: ConfigFlag = None) -> None:
    """Hold each skill against the rules of the format. Exit status 1 if one breaks them."""
    with plain_errors():
        entries = _entries(ctx, path)
    for entry in entries:
        for fault in entry.faults:
            place = FILE_NAME if fault.line is None else f"{FILE_NAME}:{fault.line}"
            print(f"{_shown(entry.name)}/{place}: {_shown(fault.message)}")
    invalid = sum(1 for entry in entries if entry.faults)
    print(f"{len(entries)} {'skill' if len(entries) == 1 else 'skills'}, {invalid} invalid")
    if invalid:
        raise typer.Exit(1)


def _entries(ctx: typer.Context, path: Path | None) -> tuple[SkillEntry, ...]:
    """The skills below a folder; those of one that holds a SKILL.md itself are that one."""
    if path is None:
        folder = settings_from(ctx.params).skills.dir
        if folder is None:
            raise ConfigError("no folder of skills", hint="Name one, or set skills.dir in the settings.")
        return SkillLibrary(Path(folder)).list()
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder", hint="Name a folder of skills, or of one skill.")
    return (check(path),) if (path / FILE_NAME).exists() else SkillLibrary(path).list()


def _row(entry: SkillEntry) -> tuple[str, str, str]:
    if entry.skill is None:
        return _shown(entry.name), "", f"invalid: {_shown(str(entry.faults[0]))}"
    questions = ", ".join(q.slug + ("*" if q.required else "") for q in entry.skill.questions)
    return entry.skill.name, questions, " ".join(entry.skill.description.split())


def _shown(text: str) -> str:
    """What came from the disk, made fit for a terminal: names there may be any bytes."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
