"""`kiln skills`: what the skills folder holds, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kiln.cli.common import ConfigFlag, plain_errors, settings_from
from kiln.cli.manage.listing import folder_of, invalid, report, show_rows
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
    """List the skills: name, questions (* for required ones), description."""
    with plain_errors():
        entries = _entries(ctx, path)
    show_rows(("skill", "questions", "description"), map(_row, entries))


@skills.command("check")
def check_skills(ctx: typer.Context, path: PathArgument = None, config: ConfigFlag = None) -> None:
    """Hold each skill against the rules of the format. Exit status 1 if one breaks them."""
    with plain_errors():
        entries = _entries(ctx, path)
    report(entries, f"{{}}/{FILE_NAME}", "skills")


def _entries(ctx: typer.Context, path: Path | None) -> tuple[SkillEntry, ...]:
    """The skills of a folder; of one that holds a SKILL.md itself, that one."""
    folder = folder_of(path, None if path else settings_from(ctx.params).skills.dir, "skills")
    if path is not None and (path / FILE_NAME).exists():
        return (check(path),)
    return SkillLibrary(folder).list()


def _row(entry: SkillEntry) -> tuple[str, str, str]:
    if entry.skill is None:
        return entry.name, "", invalid(entry)
    questions = ", ".join(q.slug + ("*" if q.required else "") for q in entry.skill.questions)
    return entry.name, questions, " ".join(entry.skill.description.split())
