"""What the native dialect lists: skills and agents. Fields that say nothing are left out."""

from __future__ import annotations

from typing import Any

import msgspec


class CatalogFault(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is wrong with a file; `line` counts from 1."""

    message: str
    line: int | None = None


class SkillQuestion(msgspec.Struct, frozen=True, omit_defaults=True):
    """A question that `skill_inputs` answers under its slug."""

    slug: str
    text: str
    required: bool
    default: str | None = None


class SkillListing(msgspec.Struct, frozen=True, omit_defaults=True):
    """A skill, or with `valid: false` the faults of what should be one."""

    name: str
    valid: bool
    description: str | None = None
    license: str | None = None
    compatibility: str | None = None
    allowed_tools: list[str] = []
    questions: list[SkillQuestion] = []
    faults: list[CatalogFault] = []


class SkillList(msgspec.Struct, frozen=True):
    """Body of GET /lmkit/v1/skills."""

    skills: list[SkillListing]


class AgentListing(msgspec.Struct, frozen=True, omit_defaults=True):
    """An agent, or with `valid: false` the faults of its file. `defaults` are fields of the native chat
    but for the system prompt and the answers to skills, which stay on the server."""

    name: str
    valid: bool
    description: str | None = None
    has_system: bool | None = None
    defaults: dict[str, Any] | None = None
    faults: list[CatalogFault] = []


class AgentList(msgspec.Struct, frozen=True):
    """Body of GET /lmkit/v1/agents."""

    agents: list[AgentListing]
