"""What an adapter may be called. A name is one folder of the adapter directory, never a path."""

from __future__ import annotations

from kiln.core.errors import InvalidField
from kiln.core.text import shorten

MAX_NAME_BYTES = 128
# What responses call the model without an adapter.
BASE = "base"

_HINT = f"A name is one to {MAX_NAME_BYTES} bytes of printable text without / \\ and a leading dot."


def check_name(name: str, param: str) -> str:
    """The name itself. Raises InvalidField, naming `param`, for one that no adapter can have."""
    problem = _problem(name)
    if problem is not None:
        raise InvalidField(f"{param}: the adapter name {shorten(name)} {problem}", param=param, hint=_HINT)
    return name


def check_new_name(name: str, param: str) -> str:
    """A name under which an adapter may be saved."""
    check_name(name, param)
    if name == BASE:
        raise InvalidField(f"{param}: {BASE!r} stands for the model without an adapter", param=param)
    return name


def is_name(name: str) -> bool:
    return _problem(name) is None and name != BASE


def _problem(name: str) -> str | None:
    if name == "":
        return "is empty"
    # Also true of lone surrogates, which no file system text can hold.
    if not name.isprintable():
        return "holds control or unprintable characters"
    if len(name.encode()) > MAX_NAME_BYTES:
        return f"is longer than {MAX_NAME_BYTES} bytes"
    if "/" in name or "\\" in name:
        return "holds a path separator"
    if name.startswith("."):
        return "begins with a dot"
    if name[1:2] == ":" and name[0].isalpha():
        return "begins like the path of a drive"
    if name != name.strip():
        return "begins or ends with a space"
    return None
