"""Who sends a request and what they may do."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

# The owner of what callers without a key leave on the server; no key can have this name.
ANONYMOUS = ""


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller. What they leave on the server belongs to `owner`: the name of their key, or ANONYMOUS."""

    owner: str
    is_admin: bool = False

    @property
    def name(self) -> str:
        return self.owner or "anonymous"

    @property
    def scopes(self) -> tuple[str, ...]:
        return ("inference", "admin") if self.is_admin else ("inference",)


# Who the request under way came from. The HTTP side sets it for the request's task.
CALLER: ContextVar[Identity | None] = ContextVar("kiln_caller", default=None)


def current_owner() -> str:
    """The owner of what the request under way leaves on the server."""
    identity = CALLER.get()
    return ANONYMOUS if identity is None else identity.owner
