"""The skills of a folder, as they are on disk at the moment they are asked for."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kiln.core.errors import ConfigError, InvalidField, SkillInvalid, SkillNotFound
from kiln.core.text import shorten
from kiln.skills.files import Fault, Faulty, Signature, read_text
from kiln.skills.instructions import pinned_text
from kiln.skills.offer import SkillOffer
from kiln.skills.questions import answer
from kiln.skills.reload import Reloading
from kiln.skills.skill import FILE_NAME, MAX_FILE_BYTES, Skill, is_name, parse

log = logging.getLogger(__name__)

MAX_OFFERED = 32


@dataclass(frozen=True, slots=True)
class SkillEntry:
    """One folder of the library: a skill, or what is wrong with it."""

    name: str
    skill: Skill | None
    faults: tuple[Fault, ...] = ()


class SkillLibrary:
    """Skills by name. Every call looks at the disk: call it on a worker thread, never on the event loop.

    An edit counts from the next call on. A skill that an edit broke is refused with the reason, and the
    others stay as they are. Without a folder the library is empty.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Raises ConfigError if there is no such folder."""
        if folder is not None and not folder.is_dir():
            raise ConfigError(
                f"skills.dir = {str(folder)!r} is not a folder",
                hint="Name a folder of skills, or leave it out.",
            )
        self._folder = folder
        self._skills = Reloading(_load)

    def list(self) -> tuple[SkillEntry, ...]:
        """Every folder of the library by name, the invalid ones with their faults."""
        if self._folder is None:
            return ()
        try:
            names = folders(self._folder)
        except OSError as error:
            log.warning("the skills cannot be listed: %s", error)
            return ()
        return tuple(self._entry(name) for name in names)

    def _entry(self, name: str) -> SkillEntry:
        assert self._folder is not None
        try:
            return SkillEntry(name, self._skills.get(self._folder / name / FILE_NAME))
        except FileNotFoundError:
            return SkillEntry(name, None, (Fault(f"the folder has no {FILE_NAME}"),))
        except Faulty as error:
            return SkillEntry(name, None, error.faults)

    def get(self, name: str, *, param: str = "skill") -> Skill:
        """Raises SkillNotFound, or SkillInvalid with the reason; `param` is the request's field."""
        if self._folder is not None and is_name(name):
            try:
                return self._skills.get(self._folder / name / FILE_NAME)
            except FileNotFoundError:
                pass
            except Faulty as error:
                raise SkillInvalid(f"the skill {name} is invalid: {error}", param=param) from None
        raise SkillNotFound(f"there is no skill {shorten(name)} on this server", param=param)

    def pinned(
        self,
        name: str,
        inputs: Mapping[str, object] | None = None,
        *,
        param: str = "skill",
        inputs_param: str = "skill_inputs",
    ) -> str:
        """The text that a pinned skill adds to the system turn: instructions, files, answers as data.

        Raises as `get` does, and InvalidField that names `skill_inputs.<slug>` for answers that do not fit.
        """
        skill = self.get(name, param=param)
        answers = answer(skill.name, skill.questions, inputs or {}, param=inputs_param)
        return pinned_text(skill, answers)

    def offer(self, names: Sequence[str], *, param: str = "skills") -> SkillOffer:
        """Skills that the model may activate by itself in one exchange; a name that stands twice counts once.

        Raises as `get` does, naming `skills[i]`, and InvalidField for more than MAX_OFFERED names.
        """
        if len(names) > MAX_OFFERED:
            raise InvalidField(f"{len(names)} skills; at most {MAX_OFFERED} can be offered", param=param)
        skills = {name: self.get(name, param=f"{param}[{i}]") for i, name in enumerate(names)}
        return SkillOffer(tuple(skills.values()), self.get)

    def catalog(self, names: Sequence[str]) -> str:
        """What the system turn says of offered skills. Raises as `offer` does."""
        return self.offer(names).catalog


def folders(root: Path) -> list[str]:
    """Names of the folders that are meant as skills: all but hidden ones."""
    with os.scandir(root) as found:
        return sorted(e.name for e in found if not e.name.startswith(".") and os.path.isdir(e.path))


def check(folder: Path) -> SkillEntry:
    """One skill's folder, read afresh."""
    folder = folder.resolve()
    try:
        outcome, _ = _load(folder / FILE_NAME)
    except FileNotFoundError:
        outcome = Faulty(Fault(f"the folder has no {FILE_NAME}"))
    if isinstance(outcome, Faulty):
        return SkillEntry(folder.name, None, outcome.faults)
    return SkillEntry(folder.name, outcome)


def _load(path: Path) -> tuple[Skill | Faulty, Signature]:
    status = path.stat()
    try:
        text, signature = read_text(path.parent, path, MAX_FILE_BYTES)
    except Faulty as error:
        return error, Signature.of(status)
    try:
        return parse(text, path.parent), signature
    except Faulty as error:
        return error, signature
