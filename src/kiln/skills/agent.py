"""One agent: a bundle of defaults for a native chat, written as a TOML file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kiln.skills.files import Fault, Faulty

SUFFIX = ".toml"
MAX_FILE_BYTES = 131_072
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ID = r"^[A-Za-z0-9_-]+\Z"

# The bounds are those of the request's fields, so that what is adopted is as good as what is sent.
Text: TypeAlias = Annotated[str, Meta(min_length=1)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
Names: TypeAlias = Annotated[tuple[Name, ...], Meta(max_length=128)]
MemoryId: TypeAlias = Annotated[str, Meta(max_length=128, pattern=_ID)]
Effort: TypeAlias = Literal["none", "low", "medium", "high"]
EFFORTS: tuple[str, ...] = get_args(Effort)
# Three states, as in a request: left out, a number, or no limit at all.
Budget: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)] | Literal["unlimited"]


class AgentSampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The `[sampling]` of an agent, in the fields of the native chat. None leaves a dimension alone."""

    temperature: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=1000)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**32 - 1)] | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stop: Annotated[tuple[Text, ...], Meta(max_length=16)] | None = None


class Agent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """An agent as its file states it; what it leaves out is None, or UNSET for the budgets.

    `name` is the file's and stands in no file. A budget of "unlimited" lifts the server's default.
    `memory` true means a memory of the agent's own, under its name; a text is the id of another one.
    """

    name: str = ""
    description: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    system: Text | None = None
    model: Text | None = None
    skill: Name | None = None
    skill_inputs: dict[str, str | int | float | bool] | None = None
    skills: Names | None = None
    server_tools: Names | None = None
    reasoning: Effort | None = None
    thinking_budget_tokens: Budget | UnsetType = UNSET
    thinking_budget_ms: Budget | UnsetType = UNSET
    memory: bool | MemoryId | None = None
    memory_store: MemoryId | None = None
    sampling: AgentSampling = AgentSampling()

    @property
    def memory_id(self) -> str | None:
        """The memory that an exchange uses unless its request says otherwise."""
        if isinstance(self.memory, bool):
            return self.name if self.memory else None
        return self.memory

    def request_fields(self) -> dict[str, Any]:
        """What the agent states, keyed by the native chat's request fields and in their types.

        Sampling is flat, `memory` is an id, and a budget of None means unlimited.
        """
        stated = {
            "system": self.system,
            "model": self.model,
            "skill": self.skill,
            "skill_inputs": None if self.skill_inputs is None else dict(self.skill_inputs),
            "skills": self.skills,
            "server_tools": self.server_tools,
            "reasoning": self.reasoning,
            "memory": self.memory_id,
            "memory_store": self.memory_store,
            **{name: getattr(self.sampling, name) for name in AgentSampling.__struct_fields__},
        }
        fields = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in stated.items()
            if value is not None
        }
        for name in ("thinking_budget_tokens", "thinking_budget_ms"):
            limit = getattr(self, name)
            if limit is not UNSET:
                fields[name] = None if limit == "unlimited" else limit
        return fields


def adopt(agent: Agent, stated: Mapping[str, Any]) -> dict[str, Any]:
    """A request's fields over the agent's: any field that the request states wins, whole.

    `stated` holds only what the request states, an empty list or text too. One thing is not the fields' own
    affair: the agent's answers belong to the agent's skill, so they do not go with another.
    """
    fields = {**agent.request_fields(), **stated}
    if "skill_inputs" not in stated and fields.get("skill") != agent.skill:
        fields.pop("skill_inputs", None)
    return fields


def is_name(text: str) -> bool:
    """Letters, digits, dash and underscore: a name is also a valid memory id, and leads nowhere else."""
    return _NAME.fullmatch(text) is not None


def parse(name: str, text: str) -> Agent:
    """The agent of a file's text. Raises Faulty."""
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise Faulty(Fault("it is nested too deeply")) from None
    except ValueError as error:
        found = re.search(r"\(at line (\d+), column \d+\)", str(error))
        line = int(found[1]) if found else text.count("\n") + 1
        raise Faulty(Fault(f"it is not valid TOML: {error}", line)) from None
    if "name" in table:
        raise Faulty(Fault("`name` is no key: an agent is named by its file"))
    try:
        agent = msgspec.convert(table, Agent)
    except msgspec.ValidationError as error:
        raise Faulty(_explained(str(error), text)) from None
    if agent.skill_inputs is not None and agent.skill is None:
        raise Faulty(Fault("`skill_inputs` answers a skill's questions, but the agent pins no `skill`"))
    return msgspec.structs.replace(agent, name=name)


def _explained(message: str, text: str) -> Fault:
    """msgspec's message in the file's terms, with the line where the key is easily found."""
    reason, _, where = message.partition(" - at `")
    path = where.rstrip("`").removeprefix("$").lstrip(".")
    unknown = re.search(r"unknown field `(.*)`", reason)
    if unknown:
        path = f"{path}.{unknown[1]}" if path else unknown[1]
        reason = "is no key of an agent"
    elif reason.startswith("Invalid enum value"):
        allowed = ", ".join(EFFORTS) if path == "reasoning" else 'a whole number or "unlimited"'
        reason = f"must be {allowed}"
    line = None
    key = re.match(r"[^\[]*", path.rsplit(".", 1)[-1])
    if key and key[0]:
        found = re.search(rf"^\s*\[?\"?{re.escape(key[0])}\b", text, re.MULTILINE)
        line = text.count("\n", 0, found.end()) + 1 if found else None
    return Fault(f"`{path}` {reason}" if unknown else f"`{path}`: {reason}", line)
