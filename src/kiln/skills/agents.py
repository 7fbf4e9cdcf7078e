"""The agents of a folder, as their files are at the moment they are asked for."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from kiln.core.errors import AgentInvalid, AgentNotFound, ConfigError
from kiln.core.text import shorten
from kiln.skills.agent import MAX_FILE_BYTES, SUFFIX, Agent, is_name, parse
from kiln.skills.files import Fault, Faulty, Signature, read_text
from kiln.skills.reload import Reloading

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentEntry:
    """One file of the library: an agent, or what is wrong with it."""

    name: str
    agent: Agent | None
    faults: tuple[Fault, ...] = ()


class AgentLibrary:
    """Agents by name. As with skills, calls look at the disk: make them on a worker thread."""

    def __init__(self, folder: Path | None = None) -> None:
        """Raises ConfigError if there is no such folder."""
        if folder is not None and not folder.is_dir():
            raise ConfigError(
                f"agents.dir = {str(folder)!r} is not a folder",
                hint="Name a folder of agents, or leave it out.",
            )
        self._folder = folder
        self._agents = Reloading(_load)

    def list(self) -> tuple[AgentEntry, ...]:
        """Every agent file by name, the invalid ones with their faults."""
        if self._folder is None:
            return ()
        try:
            names = _names(self._folder)
        except OSError as error:
            log.warning("the agents cannot be listed: %s", error)
            return ()
        return tuple(filter(None, map(self._entry, names)))

    def _entry(self, name: str) -> AgentEntry | None:
        assert self._folder is not None
        if not is_name(name):
            message = "an agent's name may hold letters, digits, dash and underscore only, 64 at most"
            return AgentEntry(name, None, (Fault(message),))
        try:
            return AgentEntry(name, self._agents.get(self._folder / f"{name}{SUFFIX}"))
        except FileNotFoundError:
            return None  # gone since the folder was read
        except Faulty as error:
            return AgentEntry(name, None, error.faults)

    def get(self, name: str, *, param: str = "agent") -> Agent:
        """Raises AgentNotFound, or AgentInvalid with the reason; `param` is the request's field."""
        if self._folder is not None and is_name(name):
            try:
                return self._agents.get(self._folder / f"{name}{SUFFIX}")
            except FileNotFoundError:
                pass
            except Faulty as error:
                raise AgentInvalid(f"the agent {name} is invalid: {error}", param=param) from None
        raise AgentNotFound(f"there is no agent {shorten(name)} on this server", param=param)


def _names(root: Path) -> list[str]:
    with os.scandir(root) as found:
        names = [entry.name for entry in found if not entry.name.startswith(".")]
    return sorted(name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))


def _load(path: Path) -> tuple[Agent | Faulty, Signature]:
    status = path.stat()
    try:
        # A link to a file elsewhere is the operator's own doing, as with mounted configurations.
        text, signature = read_text(path.resolve().parent, path, MAX_FILE_BYTES)
    except Faulty as error:
        return error, Signature.of(status)
    try:
        return parse(path.stem, text), signature
    except Faulty as error:
        return error, signature
