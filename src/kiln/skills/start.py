"""Both libraries together: opened when a server starts, and held against each other."""

from __future__ import annotations

import logging
from pathlib import Path

from kiln.core.errors import SkillInvalid, SkillNotFound
from kiln.core.settings import Settings
from kiln.skills.agent import Agent
from kiln.skills.agents import AgentLibrary
from kiln.skills.files import Fault
from kiln.skills.library import SkillLibrary

log = logging.getLogger(__name__)


def open_libraries(settings: Settings) -> tuple[SkillLibrary, AgentLibrary]:
    """Skills and agents of the configured folders. Invalid ones stop nothing, but the log names them once.

    Raises ConfigError for a folder that is not there.
    """
    skills = SkillLibrary(_folder(settings.skills.dir))
    agents = AgentLibrary(_folder(settings.agents.dir))
    for found in skills.list():
        for fault in found.faults:
            log.warning("the skill %r is invalid: %s", found.name, fault)
    for entry in agents.list():
        for fault in entry.faults:
            log.warning("the agent %r is invalid: %s", entry.name, fault)
        if entry.agent is not None:
            for fault in unmet(entry.agent, skills):
                log.warning("the agent %r cannot be used as it is: %s", entry.name, fault)
    return skills, agents


def unmet(agent: Agent, skills: SkillLibrary) -> tuple[Fault, ...]:
    """What an agent names that the skills lack. A required answer that it leaves out is no fault: the
    request may give it."""
    faults = []
    for name in (*((agent.skill,) if agent.skill is not None else ()), *(agent.skills or ())):
        try:
            skills.get(name)
        except (SkillNotFound, SkillInvalid) as error:
            faults.append(Fault(error.message))
    if agent.skill is not None and not faults:
        asked = {question.slug for question in skills.get(agent.skill).questions}
        for slug in agent.skill_inputs or {}:
            if slug not in asked:
                faults.append(Fault(f"`skill_inputs.{slug}`: the skill {agent.skill} has no such question"))
    return tuple(faults)


def _folder(path: str | None) -> Path | None:
    return None if path is None else Path(path)
