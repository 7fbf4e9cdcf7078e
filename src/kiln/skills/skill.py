"""One skill: what a SKILL.md declares, checked against the rules of the Agent Skills format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from kiln.skills.files import Fault, Faulty
from kiln.skills.frontmatter import Entry, split
from kiln.skills.questions import METADATA_KEY, Question, declared

FILE_NAME = "SKILL.md"
MAX_FILE_BYTES = 131_072
MAX_NAME = 64
MAX_DESCRIPTION = 1024
MAX_COMPATIBILITY = 500
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class Skill:
    """A valid skill. `instructions` is the Markdown below the head, `folder` where its resources lie."""

    name: str
    description: str
    instructions: str
    folder: Path = field(repr=False)
    license: str | None = None
    compatibility: str | None = None
    metadata: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    allowed_tools: tuple[str, ...] = ()
    questions: tuple[Question, ...] = ()


def is_name(text: str) -> bool:
    """Whether the format allows this name; no such name leads anywhere but into the library's folder."""
    return len(text) <= MAX_NAME and _NAME.fullmatch(text) is not None


def parse(text: str, folder: Path) -> Skill:
    """The skill of a SKILL.md in `folder`. Raises Faulty with everything that is wrong."""
    fields, instructions = split(text)
    reading = _Reading(fields)
    name = reading.text("name", MAX_NAME, required=True)
    if name is not None:
        reading.check_name(name, folder.name)
    description = reading.text("description", MAX_DESCRIPTION, required=True)
    licence = reading.text("license")
    compatibility = reading.text("compatibility", MAX_COMPATIBILITY)
    metadata = reading.metadata()
    allowed_tools = reading.allowed_tools()
    questions = reading.questions(metadata)
    reading.unknown()
    if reading.faults:
        raise Faulty(*sorted(reading.faults, key=lambda fault: fault.line or 0))
    assert name is not None and description is not None
    return Skill(
        name=name,
        description=description,
        instructions=instructions,
        folder=folder,
        license=licence,
        compatibility=compatibility,
        metadata=MappingProxyType(metadata),
        allowed_tools=allowed_tools,
        questions=questions,
    )


class _Reading:
    """Takes the fields one by one, and keeps what is wrong with each."""

    def __init__(self, fields: Mapping[str, Entry]) -> None:
        self._fields = fields
        self._read: set[str] = set()
        self.faults: list[Fault] = []

    def _take(self, key: str) -> Entry | None:
        self._read.add(key)
        return self._fields.get(key)

    def _blame(self, key: str, message: str) -> None:
        entry = self._fields.get(key)
        self.faults.append(Fault(f"`{key}` {message}", None if entry is None else entry.line))

    def text(self, key: str, most: int | None = None, *, required: bool = False) -> str | None:
        entry = self._take(key)
        if entry is None:
            if required:
                self.faults.append(Fault(f"the required field `{key}` is missing", 1))
            return None
        if not isinstance(entry.value, str):
            self._blame(key, "must be a text")
        elif not entry.value.strip():
            self._blame(key, "must not be empty")
        elif most is not None and len(entry.value) > most:
            self._blame(key, f"has {len(entry.value)} characters; at most {most} are allowed")
        else:
            return entry.value.strip()
        return None

    def check_name(self, name: str, folder: str) -> None:
        if not is_name(name):
            rule = "may hold lower-case letters, digits and single hyphens between them only"
            self._blame("name", rule)
        elif name != folder:
            self._blame("name", f"is {name}, but the folder is {folder}: they must be the same")

    def metadata(self) -> dict[str, str]:
        entry = self._take("metadata")
        if entry is None or entry.value == "":
            return {}
        if not isinstance(entry.value, dict):
            self._blame("metadata", "must be a map of texts")
            return {}
        texts = {}
        for key, inner in entry.value.items():
            if isinstance(inner.value, str):
                texts[key] = inner.value
            else:
                self.faults.append(Fault(f"`metadata.{key}` must be a text", inner.line))
        return texts

    def allowed_tools(self) -> tuple[str, ...]:
        entry = self._take("allowed-tools")
        if entry is None:
            return ()
        if isinstance(entry.value, str):
            return tuple(entry.value.split())
        if isinstance(entry.value, tuple):
            texts = tuple(item.value for item in entry.value if isinstance(item.value, str))
            if len(texts) == len(entry.value):
                return texts
        self._blame("allowed-tools", "must be a text of names with spaces between, or a list of texts")
        return ()

    def questions(self, metadata: Mapping[str, str]) -> tuple[Question, ...]:
        if METADATA_KEY not in metadata:
            return ()
        try:
            return declared(metadata[METADATA_KEY])
        except Faulty as error:
            held = self._fields["metadata"].value
            assert isinstance(held, dict)
            self.faults += [Fault(fault.message, held[METADATA_KEY].line) for fault in error.faults]
            return ()

    def unknown(self) -> None:
        for key, entry in self._fields.items():
            if key not in self._read:
                self.faults.append(
                    Fault(f"`{key}` is no field of the format; own ones belong under `metadata`", entry.line)
                )
