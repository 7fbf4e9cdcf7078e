"""`kiln agents`: what the agents folder holds, and what is wrong with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kiln.cli.common import ConfigFlag, plain_errors, settings_from
from kiln.cli.manage.listing import folder_of, invalid, report, show_rows
from kiln.skills.agent import SUFFIX
from kiln.skills.agents import AgentEntry, AgentLibrary
from kiln.skills.library import SkillLibrary
from kiln.skills.start import unmet

agents = typer.Typer(
    name="agents",
    help="List or check the agents that requests may adopt.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

PathArgument = Annotated[
    Path | None, typer.Argument(metavar="PATH", help="A folder of agents; else the setting agents.dir.")
]


@agents.command("list")
def list_agents(ctx: typer.Context, path: PathArgument = None, config: ConfigFlag = None) -> None:
    """List the agents: name, the fields that they set, description."""
    with plain_errors():
        folder = folder_of(path, None if path else settings_from(ctx.params).agents.dir, "agents")
        entries = AgentLibrary(folder).list()
    show_rows(("agent", "sets", "description"), map(_row, entries))


@agents.command("check")
def check_agents(ctx: typer.Context, path: PathArgument = None, config: ConfigFlag = None) -> None:
    """Check each agent, and with skills.dir set that the skills which it names are there. Exit status 1
    on a fault."""
    with plain_errors():
        settings = settings_from(ctx.params)
        entries = AgentLibrary(folder_of(path, settings.agents.dir, "agents")).list()
        if settings.skills.dir is not None:
            skills = SkillLibrary(Path(settings.skills.dir))
            entries = tuple(_with_unmet(entry, skills) for entry in entries)
    report(entries, f"{{}}{SUFFIX}", "agents")


def _with_unmet(entry: AgentEntry, skills: SkillLibrary) -> AgentEntry:
    return entry if entry.agent is None else replace(entry, faults=unmet(entry.agent, skills))


def _row(entry: AgentEntry) -> tuple[str, str, str]:
    if entry.agent is None:
        return entry.name, "", invalid(entry)
    return entry.name, ", ".join(entry.agent.request_fields()), entry.agent.description or ""
