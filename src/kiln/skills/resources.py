"""The files that come with a skill: which there are, and their text for the model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kiln.core.text import shorten
from kiln.skills.files import Faulty, read_within
from kiln.skills.skill import FILE_NAME, Skill

MAX_RESOURCE_BYTES = 32_768
MAX_PATH_CHARS = 512
MAX_LISTED = 64
_MAX_DEPTH = 4
# Entries looked at before a listing ends, whatever they are.
_MAX_SEEN = 2_000


class ResourceRefused(Exception):
    """A path that is not read. The message is for the model: it names no place outside the skill."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Paths inside the skill, sorted; `more` says that the list was cut."""

    paths: tuple[str, ...]
    more: bool


def listing(skill: Skill) -> Listing:
    """The files beside SKILL.md, hidden ones and links to folders left out."""
    paths: list[str] = []
    for seen, path in enumerate(_walk(skill.folder.resolve(), "")):
        if len(paths) == MAX_LISTED or seen == _MAX_SEEN:
            return Listing(tuple(sorted(paths)), more=True)
        if path is not None and path != FILE_NAME:
            paths.append(path)
    return Listing(tuple(sorted(paths)), more=False)


def _walk(root: Path, prefix: str) -> Iterator[str | None]:
    """Files of a skill below `prefix`; None for what else was met, so that the caller can count."""
    try:
        with os.scandir(root / prefix) as found:
            for entry in found:
                if entry.name.startswith(".") or not _is_plain(entry.name):
                    yield None
                elif entry.is_dir(follow_symlinks=False):
                    yield None
                    if prefix.count("/") < _MAX_DEPTH:
                        yield from _walk(root, f"{prefix}{entry.name}/")
                else:
                    yield f"{prefix}{entry.name}" if _is_own_file(root, entry) else None
    except OSError:
        return  # gone or closed to us meanwhile: it offers nothing


def _is_own_file(root: Path, entry: os.DirEntry[str]) -> bool:
    if not entry.is_symlink():
        return entry.is_file()
    real = os.path.realpath(entry.path)
    return os.path.isfile(real) and Path(real).is_relative_to(root)


def read_resource(skill: Skill, path: str) -> tuple[str, str]:
    """The plain path of a file of the skill, and its text.

    At most MAX_RESOURCE_BYTES are read; a note stands where the text was cut.

    `path` is relative to the skill's folder, with `/` between its parts. Raises ResourceRefused for a
    path that is absolute, leaves the skill (by `..` or by a link), is hidden or leads to no regular file
    of UTF-8 text.
    """
    parts = _parts(path)
    try:
        data, signature = read_within(skill.folder, skill.folder.joinpath(*parts), MAX_RESOURCE_BYTES + 1)
    except FileNotFoundError:
        raise ResourceRefused(f"there is no file {shorten(path)} in the skill {skill.name}") from None
    except Faulty as error:
        raise ResourceRefused(f"{shorten(path)} cannot be read: {error.faults[0].message}") from None
    cut = len(data) > MAX_RESOURCE_BYTES
    try:
        text = data[:MAX_RESOURCE_BYTES].decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # A character that the cut went through is no sign of a binary file.
        if not (cut and error.start >= MAX_RESOURCE_BYTES - 3 and error.reason == "unexpected end of data"):
            raise ResourceRefused(_binary(path)) from None
        text = data[: error.start].decode("utf-8-sig")
    if "\0" in text:
        raise ResourceRefused(_binary(path))
    if cut:
        shown = f"only the first {MAX_RESOURCE_BYTES} are shown"
        text += f"\n[cut here: the file has {signature.size} bytes, {shown}]"
    return "/".join(parts), text


def _parts(path: str) -> list[str]:
    if not path.strip() or len(path) > MAX_PATH_CHARS or not _is_plain(path):
        raise ResourceRefused("the path must be a short text without control characters")
    if path.startswith("/") or "\\" in path or ":" in path:
        raise ResourceRefused("the path must be relative to the skill's folder, with `/` between its parts")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if any(part.startswith(".") for part in parts):
        raise ResourceRefused("the path may name neither `..` nor hidden files")
    if not parts:
        raise ResourceRefused("the path must name a file")
    return parts


def _is_plain(text: str) -> bool:
    """No control characters, and no halves of surrogate pairs, which stand for bytes that are not UTF-8."""
    return not any(ord(c) < 0x20 or ord(c) == 0x7F or 0xD800 <= ord(c) < 0xE000 for c in text)


def _binary(path: str) -> str:
    return f"{shorten(path)} is not a text file, so it cannot be shown"
