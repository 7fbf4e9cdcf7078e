"""Adapters as `.tar.gz` archives: unpacking what a stranger packed, and packing for download.

An archive may hold one top folder. Files other than an adapter's are passed over; anything that is
neither file nor folder, or that would land elsewhere, is refused before a byte of it is written.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Self, cast

from kiln.adapters.config import CONFIG_FILE
from kiln.adapters.storage import KEPT_FILES
from kiln.adapters.weights import WEIGHTS_FILE
from kiln.core.errors import BodyTooLarge, InvalidAdapter
from kiln.core.text import shorten

MAX_ENTRIES = 256
_MAX_HEADER_BYTES = 64 * 1024
_EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
# What a stranger's bytes make the readers raise. `tarfile` lets numbers and texts of extended headers that
# are none through as ValueError; a full disk (any other OSError) is not the archive's fault.
_DAMAGE = (
    EOFError,
    gzip.BadGzipFile,
    zlib.error,
    tarfile.TarError,
    RecursionError,
    ValueError,
    OverflowError,
)
_CHUNK = 1 << 20
_HINT = "Pack the adapter's folder with `tar -czf adapter.tar.gz FOLDER`."


def unpack(source: BinaryIO, target: Path, max_bytes: int) -> None:
    """Unpack an adapter into the empty folder `target`. `max_bytes` bounds what is unpacked.

    Raises InvalidAdapter or BodyTooLarge; `target` may then hold a part.
    """
    try:
        with gzip.GzipFile(fileobj=source, mode="rb") as plain:
            bounded = _Bounded(plain, max_bytes)
            with tarfile.open(fileobj=cast(Any, bounded), mode="r|", tarinfo=_Entry) as archive:
                found = _unpack_entries(archive, target)
            bounded.drain()
    except _DAMAGE as error:
        raise InvalidAdapter(f"the archive is no .tar.gz, or cut off: {error}", hint=_HINT) from None
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        if file not in found:
            pickled = [name for name in sorted(found) if name.endswith((".bin", ".pt", ".pth", ".pkl"))]
            instead = f"; {shorten(pickled[0])} is a pickle, which is not loaded" if pickled else ""
            raise InvalidAdapter(f"the archive holds no {file}{instead}", hint=_HINT)


def pack(name: str, files: Mapping[str, bytes], target: BinaryIO) -> None:
    """Write the files, in a folder called `name`, as a `.tar.gz` that depends on their content only."""
    with (
        # Weights hardly compress: the fastest level is as good as the best.
        gzip.GzipFile(fileobj=target, mode="wb", compresslevel=1, mtime=0) as packed,
        tarfile.open(fileobj=cast(Any, packed), mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for file, content in files.items():
            entry = tarfile.TarInfo(f"{name}/{file}")
            entry.size = len(content)
            entry.mode = 0o644
            archive.addfile(entry, io.BytesIO(content))


def _unpack_entries(archive: tarfile.TarFile, target: Path) -> set[str]:
    """Names of all files that the archive holds, without their folder."""
    found: set[str] = set()
    folders: set[str] = set()
    for count in range(MAX_ENTRIES + 1):
        entry = archive.next()
        if entry is None:
            return found
        if count == MAX_ENTRIES:
            raise InvalidAdapter(f"the archive has more than {MAX_ENTRIES} entries", hint=_HINT)
        parts = _parts_of(entry)
        if entry.isdir():
            folders.update(parts[:1])
            continue
        if parts[-1].startswith("."):  # what desktops leave behind
            continue
        folders.add(parts[0] if len(parts) == 2 else "")
        if len(folders) > 1:
            raise InvalidAdapter("the archive has more than one top folder", hint=_HINT)
        if parts[-1] in found:
            raise InvalidAdapter(f"the archive holds {shorten(parts[-1])} twice", hint=_HINT)
        found.add(parts[-1])
        if parts[-1] in KEPT_FILES:
            _extract(archive, entry, target / parts[-1])
    raise AssertionError("the last round returns or raises")


def _parts_of(entry: tarfile.TarInfo) -> tuple[str, ...]:
    """Folder and file name. Raises InvalidAdapter for what an adapter's archive does not hold."""
    name = shorten(entry.name)
    if not (entry.isdir() or entry.isreg()) or entry.issparse():
        raise InvalidAdapter(f"the archive entry {name} is neither a plain file nor a folder", hint=_HINT)
    path = PurePosixPath(entry.name)
    if path.is_absolute() or ".." in path.parts or "\\" in entry.name or not entry.name.isprintable():
        raise InvalidAdapter(f"the archive entry {name} leads out of the archive", hint=_HINT)
    depth = len(path.parts)
    if depth > 2 or (depth > 1 and entry.isdir()):
        raise InvalidAdapter(f"the archive entry {name} lies deeper than one folder", hint=_HINT)
    if depth == 0 and entry.isreg():
        raise InvalidAdapter(f"the archive entry {name} has no name", hint=_HINT)
    return path.parts


def _extract(archive: tarfile.TarFile, entry: tarfile.TarInfo, target: Path) -> None:
    content = archive.extractfile(entry)
    assert content is not None
    with content, target.open("xb") as file:
        while chunk := content.read(_CHUNK):
            file.write(chunk)


class _Entry(tarfile.TarInfo):
    """An entry whose extended headers, which are read into memory, have a bounded size."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        entry = super().frombuf(buf, encoding, errors)
        if entry.type in _EXTENDED and entry.size > _MAX_HEADER_BYTES:
            raise InvalidAdapter("the archive has an oversized header", hint=_HINT)
        return entry


class _Bounded:
    """Reads from a stream up to a limit in all."""

    def __init__(self, source: gzip.GzipFile, max_bytes: int) -> None:
        self._source = source
        self._max_bytes = max_bytes
        # The tar format's own blocks come on top of what the files hold.
        self._left = max_bytes + MAX_ENTRIES * 4096

    def read(self, size: int) -> bytes:
        data = self._source.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise BodyTooLarge(
                f"the archive unpacks to more than {self._max_bytes} bytes",
                hint="Raise model.adapter_max_bytes.",
            )
        return data

    def drain(self) -> None:
        """Read to the end, so that a missing end is noticed."""
        while self.read(_CHUNK):
            pass
