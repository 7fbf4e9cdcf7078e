"""Opens both libraries when a server starts."""

from __future__ import annotations

import logging
from pathlib import Path

from kiln.core.settings import Settings
from kiln.skills.agents import AgentLibrary
from kiln.skills.library import SkillLibrary

log = logging.getLogger(__name__)


def open_libraries(settings: Settings) -> tuple[SkillLibrary, AgentLibrary]:
    """Skills and agents of the configured folders. Invalid ones stop nothing, but the log names them once.

    Raises ConfigError for a folder that is not there.
    """
    skills = SkillLibrary(_folder(settings.skills.dir))
    agents = AgentLibrary(_folder(settings.agents.dir))
    for kind, entries in (("skill", skills.list()), ("agent", agents.list())):
        for entry in entries:
            for fault in entry.faults:
                log.warning("the %s %r is invalid: %s", kind, entry.name, fault)
    return skills, agents


def _folder(path: str | None) -> Path | None:
    return None if path is None else Path(path)
