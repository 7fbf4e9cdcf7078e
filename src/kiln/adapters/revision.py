"""A revision: one state of an adapter's files, checked, hashed and converted. It never changes."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

import msgspec

from kiln.adapters.base import BaseModel
from kiln.adapters.config import CONFIG_FILE, LoraConfig, parse_config
from kiln.adapters.convert import FORMAT, convert
from kiln.adapters.storage import disk_errors, holds_adapter, sync
from kiln.adapters.weights import WEIGHTS_FILE, Pair, parse_weights
from kiln.core.errors import AdapterNotFound, BodyTooLarge, InvalidAdapter
from kiln.core.text import shorten

# File systems stamp changes in steps of a few milliseconds: younger files may change under the same stamp.
_SETTLE_S = 0.02
ATTEMPTS = 5
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth", "pytorch_model.bin")

# What tells one state of the files from another without reading them: identity, size, times in ns.
Signature = tuple[tuple[int, int, int, int, int], ...]


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Revision:
    """`path` is the converted file; `content_sha256` covers configuration and weights.

    `size` is of both source files in bytes, `modified` their youngest change in Unix seconds.
    """

    name: str
    content_sha256: str
    path: Path
    config: LoraConfig
    size: int
    modified: float


def signature_of(folder: Path) -> Signature | None:
    """The present state of an adapter's files; None where there is no such adapter.

    Raises InvalidAdapter where a part of it is missing.
    """
    if not holds_adapter(folder):
        return None
    found = []
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        try:
            stat = (folder / name).stat()
        except OSError:
            raise InvalidAdapter(_missing(folder, name)) from None
        if not S_ISREG(stat.st_mode):
            raise InvalidAdapter(f"{name} is not a plain file")
        found.append((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return tuple(found)


def _missing(folder: Path, name: str) -> str:
    pickled = next((p for p in _PICKLES if (folder / p).exists()), None)
    if name == WEIGHTS_FILE and pickled is not None:
        return f"{pickled} is a pickle, which is not loaded: it can run code; save {WEIGHTS_FILE} instead"
    return f"{name} is missing"


def read_revision(
    name: str, folder: Path, cache: Path, base: Callable[[], BaseModel], max_bytes: int
) -> tuple[Signature, Revision]:
    """Read, check and convert what stands in `folder`. Raises InvalidAdapter or AdapterNotFound."""
    signature, config, weights = read_files(name, folder, max_bytes)
    return signature, _build(name, signature, config, weights, cache, base)


def read_files(name: str, folder: Path, max_bytes: int) -> tuple[Signature, bytes, bytes]:
    """Configuration and weights in one state: when they change meanwhile, they are read again.

    Raises AdapterNotFound, BodyTooLarge or InvalidAdapter.
    """
    for _ in range(ATTEMPTS):
        before = signature_of(folder)
        if before is None:
            raise AdapterNotFound(f"there is no adapter {shorten(name)}")
        youngest = max(max(mtime, ctime) for *_, mtime, ctime in before)
        time.sleep(min(_SETTLE_S, max(0.0, youngest / 1e9 + _SETTLE_S - time.time())))
        if sum(size for _, _, size, _, _ in before) > max_bytes:
            raise BodyTooLarge(
                f"the adapter has more than {max_bytes} bytes", hint="Raise model.adapter_max_bytes."
            )
        try:
            config, weights = ((folder / file).read_bytes() for file in (CONFIG_FILE, WEIGHTS_FILE))
            unchanged = signature_of(folder) == before
        except OSError as error:
            raise InvalidAdapter(f"its files cannot be read: {error.strerror}") from None
        if unchanged:
            return before, config, weights
    raise changes_too_fast()


def changes_too_fast(param: str | None = None) -> InvalidAdapter:
    return InvalidAdapter(
        "its files change faster than they can be read",
        param=param,
        hint="Write them elsewhere, then rename the folder.",
    )


def read_pairs(config_bytes: bytes, weights: bytes) -> tuple[LoraConfig, dict[str, Pair]]:
    """Configuration and factors out of both files. Raises InvalidAdapter."""
    config = parse_config(config_bytes)
    return config, parse_weights(weights, config)


def content_hash(config: bytes, weights: bytes) -> str:
    """`sha256:` and the hash of the canonical JSON of both files' own hashes."""
    files = {CONFIG_FILE: config, WEIGHTS_FILE: weights}
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    return "sha256:" + hashlib.sha256(msgspec.json.encode(hashes, order="sorted")).hexdigest()


def _build(
    name: str,
    signature: Signature,
    config_bytes: bytes,
    weights: bytes,
    cache: Path,
    base: Callable[[], BaseModel],
) -> Revision:
    config = parse_config(config_bytes)
    content = content_hash(config_bytes, weights)
    target = _converted(cache, content, base())
    if target.exists():
        # It was checked when it was converted. The stamp says that it is in use.
        os.utime(target)
    else:
        _write(target, config, weights, base())
    return Revision(
        name=name,
        content_sha256=content,
        path=target,
        config=config,
        size=sum(size for _, _, size, _, _ in signature),
        modified=max(mtime for *_, mtime, _ in signature) / 1e9,
    )


def _converted(cache: Path, content: str, base: BaseModel) -> Path:
    key = hashlib.sha256(f"{FORMAT} {content} {base.fingerprint}".encode()).hexdigest()
    return cache / f"{key}.gguf"


def _write(target: Path, config: LoraConfig, weights: bytes, base: BaseModel) -> None:
    """Convert into a file of another name first: a reader sees the whole file or none."""
    with disk_errors():
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{uuid.uuid4().hex}.part")
        try:
            convert(config, parse_weights(weights, config), base, part)
            # After a power cut the name must not stand for a file of zeros: it is never checked again.
            sync(part)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
