"""The adapters of a server: what the directory holds, in which revision, and which is the default.

The directory is the truth. A request looks at the files' stamps; where they have changed, the adapter
is read again, and requests that run keep the revision they began with: its converted file is named by
its content and stays while anybody holds the revision.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from msgspec import UNSET, UnsetType

from kiln.adapters.base import BaseModel
from kiln.adapters.names import is_name
from kiln.adapters.revision import (
    ATTEMPTS,
    Revision,
    Signature,
    changes_too_fast,
    content_hash,
    read_files,
    read_revision,
    signature_of,
)
from kiln.adapters.selection import NO_ADAPTER, Selection, compose
from kiln.adapters.storage import Storage, disk_errors
from kiln.core.errors import (
    AdapterInUse,
    AdapterNotFound,
    AdapterQuotaExceeded,
    AdaptersNotServed,
    InvalidAdapter,
    RequestError,
)
from kiln.core.text import shorten

log = logging.getLogger(__name__)

# Converted files that no server has used for this long are deleted at start.
_KEEP_CONVERTED_S = 7 * 24 * 3600


class AdaptersNotReady(Exception):
    """Adapters must be read first: call `load` where it may take its time, then try again."""

    def __init__(self, registry: AdapterRegistry, names: Sequence[str]) -> None:
        super().__init__(", ".join(names))
        self.names = tuple(names)
        self._registry = registry

    def load(self) -> None:
        for name in self.names:
            self._registry.load(name)


@dataclass(frozen=True, slots=True)
class Known:
    """What was found when the files stood as `signature`.

    With a `problem` the revision is the last good one, if there was any.
    """

    signature: Signature | None
    revision: Revision | None
    problem: RequestError | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One adapter of the directory, as listings show it."""

    name: str
    known: Known


class AdapterRegistry:
    """Thread-safe. `resolve` looks at file stamps only; everything else may take long."""

    def __init__(
        self, storage: Storage | None, read_base: Callable[[], BaseModel], *, max_bytes: int
    ) -> None:
        """Without storage there are no adapters. `read_base` is called when the first one is read."""
        self.max_bytes = max_bytes
        self._storage = storage
        self._read_base = read_base
        self._known: dict[str, Known] = {}
        # Whoever runs with a converted file holds one of its revisions.
        self._held: dict[Path, weakref.WeakSet[Revision]] = {}
        self._default: tuple[tuple[str, float], ...] = ()
        # One adapter is read at a time; requests for others do not wait for this lock.
        self._loading = threading.RLock()

    @property
    def storage(self) -> Storage:
        self.check_served()
        assert self._storage is not None
        return self._storage

    def check_served(self) -> None:
        """Raises AdaptersNotServed where there is no directory that adapters could be saved in."""
        if self._storage is None:
            raise AdaptersNotServed("this server has no adapter directory")

    @property
    def default(self) -> str | None:
        """Name of the adapter that requests get which name none; None is the base model."""
        return self._default[0][0] if self._default else None

    @property
    def used_bytes(self) -> int:
        return 0 if self._storage is None else self._storage.used_bytes()

    @property
    def quota(self) -> int | None:
        return None if self._storage is None else self._storage.quota

    @cached_property
    def base(self) -> BaseModel:
        return self._read_base()

    def resolve(self, pairs: Sequence[tuple[str, float]] | UnsetType, field: str) -> Selection:
        """The selection of names and scales; UNSET = the server's default.

        Raises AdapterNotFound or InvalidAdapter, naming `field`, and AdaptersNotReady.
        """
        asked = self._default if pairs is UNSET else pairs
        if not asked:
            return NO_ADAPTER
        waiting = [name for name in dict.fromkeys(n for n, _ in asked) if not self._is_current(name)]
        if waiting:
            raise AdaptersNotReady(self, waiting)
        if pairs is UNSET and self._default[0][0] not in self._known:
            raise AdapterNotFound(
                f"the adapter {shorten(self._default[0][0])}, the server's default, is not there any more",
                hint="Name another adapter or null, or take it out of use with POST /v1/adapters/unload.",
            )
        parts = []
        for index, (name, scale) in enumerate(asked):
            param = f"adapters[{index}].name" if field == "adapters" else field
            parts.append((self._find(name, param), scale))
        return compose(parts, field)

    def load(self, name: str) -> Known:
        """Bring one adapter up to date with its files. Problems are kept, to be told to who asks."""
        with self._loading:
            if name in self._known and self._is_current(name):
                return self._known[name]
            known = self._read(name, self._known.get(name))
            self._replace(name, known)
            return known

    def load_default(self, name: str | None) -> None:
        """Make an adapter the default, or the base model. Raises AdapterNotFound or InvalidAdapter."""
        if name is None:
            self._default = ()
            return
        self.load(name)
        self._find(name, "name")
        self._default = ((name, 1.0),)

    def entries(self) -> list[Entry]:
        """Everything in the directory, by name. Reads what has changed."""
        if self._storage is None:
            return []
        names = self._storage.names()
        for gone in self._known.keys() - set(names):
            self.load(gone)
        return [Entry(name, self._look(name)) for name in names]

    def save(self, staged: Path, name: str, param: str) -> tuple[Revision, bool]:
        """Make the files in `staged` the adapter `name`, and say whether it replaced another.

        Raises AdapterQuotaExceeded, or InvalidAdapter naming `param`; then everything is as before.
        """
        self.storage.check_quota(staged, name)
        with self._loading:
            try:
                self._read_folder(name, staged)
            except InvalidAdapter as error:
                error.param = param
                raise
            try:
                replaced = self.storage.install(staged, name)
                log.info("the adapter %s was %s", name, "replaced" if replaced else "saved")
                return self._require(self.load(name), name, param), replaced
            finally:
                self._trim()

    def remove(self, name: str) -> None:
        """Delete an adapter. Raises AdapterNotFound, or AdapterInUse for the server's default."""
        with self._loading:
            if name == self.default:
                raise AdapterInUse(f"the adapter {shorten(name)} is the server's default", param="name")
            with disk_errors():
                removed = self._storage is not None and self._storage.remove(name)
            if not removed:
                raise AdapterNotFound(f"there is no adapter {shorten(name)}", param="name")
            log.info("the adapter %s was deleted", name)
            self.load(name)

    def revision(self, name: str, param: str) -> Revision:
        """The present revision. Raises AdapterNotFound, or InvalidAdapter, also if an older one is good."""
        return self._require(self.load(name), name, param)

    def files(self, name: str, param: str) -> tuple[Revision, bytes, bytes]:
        """The present revision, and the configuration and weights that it was made of.

        Raises what `revision` raises.
        """
        for _ in range(ATTEMPTS):
            revision = self.revision(name, param)
            try:
                _, config, weights = read_files(name, self.storage.folder(name), self.max_bytes)
            except RequestError as error:
                raise _copy(error, name, param) from None
            if content_hash(config, weights) == revision.content_sha256:
                return revision, config, weights
        raise _copy(changes_too_fast(), name, param)

    def start(self) -> None:
        """Clean up what a crash may have left, and converted files that nobody uses."""
        if self._storage is not None:
            self._storage.recover()
            for path in self._storage.converted.glob("*.gguf"):
                if path.stat().st_mtime < time.time() - _KEEP_CONVERTED_S:
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._storage is not None:
            self._storage.close()

    def _look(self, name: str) -> Known:
        """`load`, but a full disk is this adapter's problem: who makes room must see what there is."""
        try:
            return self.load(name)
        except AdapterQuotaExceeded as full:
            before = self._known.get(name)
            return Known(None, before.revision if before is not None else None, full)

    def _is_current(self, name: str) -> bool:
        """Whether what is known of a name still holds. An unknown name without files is current."""
        known = self._known.get(name)
        try:
            signature = self._signature(name)
        except InvalidAdapter:
            # Half an adapter: it was looked at, or it must be.
            return known is not None and known.signature is None and known.problem is not None
        if known is None:
            return signature is None
        if known.revision is not None and not known.revision.path.exists():
            return False
        return signature is not None and known.signature == signature

    def _signature(self, name: str) -> Signature | None:
        if self._storage is None or not is_name(name):
            return None
        return signature_of(self._storage.folder(name))

    def _read(self, name: str, before: Known | None) -> Known:
        signature: Signature | None = None
        try:
            signature = self._signature(name)
            if signature is None:
                raise AdapterNotFound(f"there is no adapter {shorten(name)}")
            return Known(*self._read_folder(name, self.storage.folder(name)))
        except AdapterNotFound as error:
            return Known(None, None, error)
        except AdapterQuotaExceeded:
            raise  # the disk is full now, which says nothing of the adapter
        except RequestError as error:
            log.warning("the adapter %s cannot be loaded: %s", name, error.message)
            return Known(signature, before.revision if before is not None else None, error)

    def _read_folder(self, name: str, folder: Path) -> tuple[Signature, Revision]:
        signature, revision = read_revision(
            name, folder, self.storage.converted, lambda: self.base, self.max_bytes
        )
        self._held.setdefault(revision.path, weakref.WeakSet()).add(revision)
        return signature, revision

    def _replace(self, name: str, known: Known) -> None:
        if isinstance(known.problem, AdapterNotFound):
            self._known.pop(name, None)
        else:
            self._known[name] = known
            if known.revision is not None and known.problem is None:
                log.info("the adapter %s is %s", name, known.revision.content_sha256)
        self._trim()

    def _trim(self) -> None:
        """Delete converted files of revisions that nobody holds any more."""
        for path in [path for path, revisions in self._held.items() if not revisions]:
            del self._held[path]
            path.unlink(missing_ok=True)

    def _find(self, name: str, param: str) -> Revision:
        known = self._known.get(name)
        if known is None:
            raise AdapterNotFound(f"there is no adapter {shorten(name)}", param=param)
        if known.revision is None:
            assert known.problem is not None
            raise _copy(known.problem, name, param)
        return known.revision

    @staticmethod
    def _require(known: Known, name: str, param: str) -> Revision:
        if known.problem is not None:
            raise _copy(known.problem, name, param)
        assert known.revision is not None
        return known.revision


def _copy(problem: RequestError, name: str, param: str) -> RequestError:
    if isinstance(problem, AdapterNotFound):
        return AdapterNotFound(problem.message, param=param)
    return type(problem)(
        f"the adapter {shorten(name)} cannot be loaded: {problem.message}", param=param, hint=problem.hint
    )


def no_adapters() -> AdapterRegistry:
    """The registry of a model that is served without adapters."""

    def no_base() -> BaseModel:
        raise AdaptersNotServed("this model is served without adapters")

    return AdapterRegistry(None, no_base, max_bytes=0)
