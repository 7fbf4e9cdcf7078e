"""The lists of the native dialect: skills and agents, as they are on disk now."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kiln.http.routes.meta import state_of
from kiln.skills.agents import AgentEntry
from kiln.skills.files import Fault
from kiln.skills.library import SkillEntry
from kiln.wire.catalog import AgentList, AgentListing, CatalogFault, SkillList, SkillListing, SkillQuestion

_HALVES = re.compile("[\ud800-\udfff]")


async def list_skills(request: Request) -> Response:
    """GET /lmkit/v1/skills"""
    state = state_of(request)
    body = await state.service.in_worker(lambda: _encoded(SkillList([*map(_skill, state.skills.list())])))
    return Response(body, media_type="application/json")


async def list_agents(request: Request) -> Response:
    """GET /lmkit/v1/agents"""
    state = state_of(request)
    body = await state.service.in_worker(lambda: _encoded(AgentList([*map(_agent, state.agents.list())])))
    return Response(body, media_type="application/json")


def _encoded(body: SkillList | AgentList) -> bytes:
    return msgspec.json.encode(body)


def _skill(entry: SkillEntry) -> SkillListing:
    skill = entry.skill
    if skill is None:
        return SkillListing(_name(entry.name), valid=False, faults=_faults(entry.faults))
    return SkillListing(
        skill.name,
        valid=True,
        description=skill.description,
        license=skill.license,
        compatibility=skill.compatibility,
        allowed_tools=[*skill.allowed_tools],
        questions=[SkillQuestion(q.slug, q.text, q.required, q.default) for q in skill.questions],
    )


def _agent(entry: AgentEntry) -> AgentListing:
    agent = entry.agent
    if agent is None:
        return AgentListing(_name(entry.name), valid=False, faults=_faults(entry.faults))
    defaults = agent.request_fields()
    has_system = defaults.pop("system", None) is not None
    defaults.pop("skill_inputs", None)
    return AgentListing(
        agent.name, valid=True, description=agent.description, has_system=has_system, defaults=defaults
    )


def _name(name: str) -> str:
    """A name from the disk, where bytes that are not UTF-8 come as halves of surrogate pairs."""
    return _HALVES.sub("\N{REPLACEMENT CHARACTER}", name)


def _faults(faults: Iterable[Fault]) -> list[CatalogFault]:
    return [CatalogFault(_name(fault.message), fault.line) for fault in faults]
