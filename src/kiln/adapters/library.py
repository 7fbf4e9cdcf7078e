"""What the adapter routes do, one function each. All may take long: call them on a thread."""

from __future__ import annotations

import math
import tempfile
from contextlib import suppress
from typing import BinaryIO

from kiln.adapters.archive import pack, unpack
from kiln.adapters.config import CONFIG_FILE
from kiln.adapters.merge import CannotMerge, Merged, Source, merge
from kiln.adapters.names import check_name, check_new_name
from kiln.adapters.registry import AdapterRegistry
from kiln.adapters.revision import Revision, read_pairs
from kiln.adapters.storage import README_FILE, disk_errors
from kiln.adapters.weights import WEIGHTS_FILE, weights_bytes
from kiln.core.errors import InvalidAdapter, InvalidField
from kiln.wire.adapters import MergeMethod

# The share of its entries that a delta keeps in the TIES paper.
_DENSITY = 0.2


def upload(registry: AdapterRegistry, name: str, archive: BinaryIO) -> tuple[Revision, bool]:
    """Save what an archive holds under a name, and say whether it replaced another adapter.

    Raises InvalidField, InvalidAdapter, BodyTooLarge or AdapterQuotaExceeded; the disk is then as before.
    """
    check_new_name(name, "name")
    with disk_errors(), registry.storage.staged() as staged:
        try:
            unpack(archive, staged, registry.max_bytes)
        except InvalidAdapter as error:
            error.param = "archive"
            raise
        return registry.save(staged, name, "archive")


def download(registry: AdapterRegistry, name: str) -> BinaryIO:
    """An open file, without a name, of the adapter as a `.tar.gz`. Raises what `files` raises."""
    check_name(name, "name")
    _, config, weights = registry.files(name, "name")
    files = {CONFIG_FILE: config, WEIGHTS_FILE: weights}
    with suppress(OSError):  # there is none
        files[README_FILE] = (registry.storage.folder(name) / README_FILE).read_bytes()
    with disk_errors(), registry.storage.staged() as staged:
        target = tempfile.TemporaryFile(dir=staged)
        try:
            pack(name, files, target)
        except BaseException:
            target.close()
            raise
        target.seek(0)
        return target


def merge_into(
    registry: AdapterRegistry,
    name: str,
    parts: list[tuple[str, float]],
    method: MergeMethod,
    *,
    rank: int | None,
    density: float | None,
) -> tuple[Revision, bool, Merged]:
    """Merge saved adapters into a new one. Raises what `upload` raises, and AdapterNotFound."""
    check_new_name(name, "name")
    sources = []
    for index, (part, weight) in enumerate(parts):
        param = f"adapters[{index}].name"
        check_name(part, param)
        _, config, weights = registry.files(part, param)
        sources.append(Source(*read_pairs(config, weights), weight))
    total = sum(weight for _, weight in parts)
    if method == "weighted_average" and (total == 0 or not math.isfinite(total)):
        raise InvalidField(
            "the weights of an average must add up to a number that is not zero", param="adapters"
        )
    try:
        merged = merge(sources, method, rank=rank, density=_DENSITY if density is None else density)
    except CannotMerge as error:
        hint = "Use smaller weights, or a method that keeps a rank."
        raise InvalidField(str(error), param="adapters", hint=hint) from None
    with disk_errors(), registry.storage.staged() as staged:
        (staged / CONFIG_FILE).write_bytes(merged.config)
        (staged / WEIGHTS_FILE).write_bytes(weights_bytes(merged.pairs))
        revision, replaced = registry.save(staged, name, "adapters")
    return revision, replaced, merged
