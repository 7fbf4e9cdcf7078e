"""The adapter directory on disk: one folder an adapter, and `.kiln` for what is in the making.

    math/adapter_config.json, adapter_model.safetensors, README.md
    .kiln/staging/<id>/          being written; a rename into place makes it an adapter
    .kiln/replaced/<id>/<name>   on its way out, until the new one is in place
    .kiln/converted/<key>.gguf   what llama.cpp loads (or in model.adapter_cache_dir)
    .kiln/lock                   held by every server that uses the directory

A crash at any point leaves every adapter whole, old or new; `recover` removes the rest.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kiln.adapters.config import CONFIG_FILE
from kiln.adapters.names import is_name
from kiln.adapters.weights import WEIGHTS_FILE
from kiln.core.errors import AdapterQuotaExceeded, ConfigError, InvalidField

try:
    import fcntl
except ImportError:  # Windows: there one server must have the directory for itself
    fcntl = None  # type: ignore[assignment]

README_FILE = "README.md"
KEPT_FILES = (CONFIG_FILE, WEIGHTS_FILE, README_FILE)


class Storage:
    """Files of one adapter directory. Every method may take long; renames are one at a time."""

    def __init__(self, root: Path, *, converted: Path | None = None, quota: int | None = None) -> None:
        """Makes the directory where it is missing. Raises ConfigError where it cannot be used."""
        self.root = root
        self.quota = quota
        self._own = root / ".kiln"
        self.converted = converted if converted is not None else self._own / "converted"
        self._renaming = threading.Lock()
        try:
            self._own.mkdir(parents=True, exist_ok=True)
            self.converted.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._own / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(
                f"model.adapter_dir = {str(root)!r} cannot be used: {error.strerror}",
                hint="kiln keeps uploads and converted adapters there, so it must be writable.",
            ) from None

    def recover(self) -> None:
        """Undo what a crash left half-made, unless another server uses the directory right now."""
        if fcntl is None:
            self._undo()
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pass
        else:
            self._undo()
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def _undo(self) -> None:
        for replaced in self._own.glob("replaced/*/*"):
            if not self.folder(replaced.name).exists():
                replaced.rename(self.folder(replaced.name))
        shutil.rmtree(self._own / "replaced", ignore_errors=True)
        shutil.rmtree(self._own / "staging", ignore_errors=True)
        self._staging()
        for part in self.converted.glob("*.part"):
            part.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._lock)

    def _staging(self) -> Path:
        staging = self._own / "staging"
        staging.mkdir(parents=True, exist_ok=True)
        return staging

    def folder(self, name: str) -> Path:
        return self.root / name

    def names(self) -> list[str]:
        """Names of all folders that hold an adapter's files, or one of them."""
        try:
            return sorted(
                path.name for path in self.root.iterdir() if is_name(path.name) and holds_adapter(path)
            )
        except FileNotFoundError:  # the whole directory was taken away
            return []

    def used_bytes(self) -> int:
        """What the adapters take, without their converted copies."""
        return sum(_size(self.folder(name)) for name in self.names())

    @contextmanager
    def staged(self) -> Iterator[Path]:
        """A new empty folder on the same file system; what is left of it afterwards is deleted."""
        folder = self._staging() / uuid.uuid4().hex
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def check_quota(self, staged: Path, name: str) -> None:
        """Raises AdapterQuotaExceeded where `staged`, in the place of what `name` is now, is too much."""
        if self.quota is None:
            return
        size = _size(staged)
        used = self.used_bytes() - _size(self.folder(name))
        if used + size > self.quota:
            raise AdapterQuotaExceeded(
                f"the adapter has {size} bytes, {max(0, self.quota - used)} of {self.quota} are free"
            )

    def install(self, staged: Path, name: str) -> bool:
        """Make a staged folder the adapter `name`. Returns whether it replaced another.

        Raises AdapterQuotaExceeded, and InvalidField where the name is that of something else.
        """
        for path in [*staged.iterdir(), staged]:
            sync(path)
        with self._renaming:
            self.check_quota(staged, name)
            target = self.folder(name)
            # Also true of links that lead nowhere.
            replaced = os.path.lexists(target)
            if replaced and not holds_adapter(target):
                raise InvalidField(f"{name} is there, but it is not an adapter", param="name")
            aside = self._own / "replaced" / uuid.uuid4().hex
            if replaced:
                aside.mkdir(parents=True)
                target.rename(aside / name)
            staged.rename(target)
            sync(self.root)
        shutil.rmtree(aside, ignore_errors=True)
        return replaced

    def remove(self, name: str) -> bool:
        """Delete an adapter: first out of sight, then from the disk. False if there is none."""
        # On a full disk there is no room for a folder of its own: a new name in this one takes none.
        removed = self._staging() / uuid.uuid4().hex
        with self._renaming:
            if not holds_adapter(self.folder(name)):
                return False
            self.folder(name).rename(removed)
            sync(self.root)
        _discard(removed)
        return True


@contextmanager
def disk_errors() -> Iterator[None]:
    """A full disk is the caller's to mend, as a full quota is."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise AdapterQuotaExceeded(
            f"the disk is full: {os.strerror(error.errno)}", hint="Delete adapters, or make room on the disk."
        ) from None


def holds_adapter(folder: Path) -> bool:
    """Whether a folder has at least a part of an adapter; other folders are somebody else's."""
    # Not Path.exists, which raises where a folder may not be looked into.
    return any(os.path.exists(folder / file) for file in (CONFIG_FILE, WEIGHTS_FILE))


def _discard(path: Path) -> None:
    if path.is_symlink():  # somebody linked an adapter in; what it leads to is theirs
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _size(folder: Path) -> int:
    if not folder.is_dir():
        return 0
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # gone meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


def sync(path: Path) -> None:
    """Have the disk hold it before a rename says so."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
