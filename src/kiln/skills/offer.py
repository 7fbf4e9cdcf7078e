"""Skills that the model finds and activates by itself: metadata first, instructions and files on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kiln.core.errors import SkillInvalid, SkillNotFound
from kiln.core.text import shorten
from kiln.skills.instructions import ACTIVATE_TOOL, READ_TOOL, activated_text, catalog_text
from kiln.skills.resources import MAX_PATH_CHARS, ResourceRefused, read_resource
from kiln.skills.skill import Skill

TOOL_NAMES = frozenset({ACTIVATE_TOOL, READ_TOOL})
MAX_RESULT_CHARS = 40_000


@dataclass(frozen=True, slots=True)
class SkillResult:
    """What a call of one of the two tools came to.

    `text` goes back to the model as the tool's result. `status` is that of the native chat's `skill`
    event: activated, resource or missing (an unknown or broken skill); None where the call was refused
    for another reason, and `failed` then says so. `name` is the skill, as far as the call named one.
    """

    text: str
    name: str = ""
    status: Literal["activated", "resource", "missing"] | None = None
    resource: str | None = None
    failed: bool = False


class SkillOffer:
    """The skills offered in one exchange. `run` reads the disk: call it on a worker thread."""

    def __init__(self, skills: tuple[Skill, ...], find: Callable[[str], Skill]) -> None:
        self.names = tuple(skill.name for skill in skills)
        self.catalog = catalog_text(skills) if skills else ""
        self._find = find

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """Both function tools, as OpenAI-shaped definitions; none where nothing is offered."""
        if not self.names:
            return ()
        skill = {"type": "string", "enum": list(self.names), "description": "Name of the skill."}
        path = {
            "type": "string",
            "minLength": 1,
            "maxLength": MAX_PATH_CHARS,
            "description": "Path of the file inside the skill, as references/guide.md.",
        }
        return (
            _function(ACTIVATE_TOOL, "Get the instructions of a skill.", {"name": skill}),
            _function(READ_TOOL, "Read a text file of a skill.", {"name": skill, "path": path}),
        )

    def handles(self, tool: str) -> bool:
        return bool(self.names) and tool in TOOL_NAMES

    def run(self, tool: str, arguments: Mapping[str, object]) -> SkillResult:
        """Carry out the model's call. Whatever the model sent, the answer is a result that tells it."""
        name = arguments.get("name")
        if not isinstance(name, str):
            return SkillResult(f"{tool} needs a text `name`", failed=True)
        wanted = {"name"} if tool == ACTIVATE_TOOL else {"name", "path"}
        if unknown := sorted(set(arguments) - wanted):
            return SkillResult(f"{tool} takes no {shorten(unknown[0])}", name=_shown(name), failed=True)
        if name not in self.names:
            offered = ", ".join(self.names)
            return SkillResult(
                f"no skill {shorten(name)} is offered; offered are {offered}",
                _shown(name),
                "missing",
                failed=True,
            )
        try:
            skill = self._find(name)
        except (SkillNotFound, SkillInvalid) as error:
            # It was there when the exchange began, and was removed or edited meanwhile.
            return SkillResult(error.message, name, "missing", failed=True)
        if tool == ACTIVATE_TOOL:
            return SkillResult(_bounded(activated_text(skill)), name, "activated")
        return _read(skill, arguments.get("path"))


def _read(skill: Skill, path: object) -> SkillResult:
    if not isinstance(path, str):
        return SkillResult(f"{READ_TOOL} needs a text `path`", skill.name, failed=True)
    try:
        plain, text = read_resource(skill, path)
    except ResourceRefused as error:
        return SkillResult(str(error), skill.name, failed=True)
    return SkillResult(_bounded(text), skill.name, "resource", plain)


def _bounded(text: str) -> str:
    if len(text) <= MAX_RESULT_CHARS:
        return text
    kept = text[:MAX_RESULT_CHARS]
    return f"{kept}\n[cut here: it has {len(text)} characters, only the first {len(kept)} are shown]"


def _shown(name: str) -> str:
    """A name that may be reported: the model may have written anything."""
    return name if name.isprintable() and len(name) <= 64 else shorten(name, 64)


def _function(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}
