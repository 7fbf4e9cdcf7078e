"""Sizes that follow from the settings and the model: context, KV cache, sequences, threads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from kiln.core.errors import ConfigError
from kiln.core.settings import Settings

if TYPE_CHECKING:
    from kiln.backends.llamacpp import LlamaModel


LARGEST_DEFAULT_CONTEXT = 32768
LARGEST_DEFAULT_HOST_CACHE = 8 * 2**30
# cgroup v2, as a container sees its own.
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
# llama.cpp has at most 256 sequences a context; two are for padding rows and the dead.
MAX_SEQUENCES = 254


def sequences(settings: Settings) -> int:
    """Resident sequences: as many again as may run retain the prefixes of requests that have ended."""
    return min(2 * settings.engine.parallel, MAX_SEQUENCES)


def context_length(settings: Settings, llama: LlamaModel) -> int:
    asked = settings.engine.ctx_size
    if asked is not None and asked > llama.train_context:
        raise ConfigError(
            f"engine.ctx_size = {asked} exceeds the {llama.train_context} tokens the model was trained for"
        )
    return asked if asked is not None else min(llama.train_context, LARGEST_DEFAULT_CONTEXT)


def kv_cells(settings: Settings, context_length: int) -> int:
    asked = settings.engine.kv_size
    if asked is not None and asked < context_length:
        raise ConfigError(
            f"engine.kv_size = {asked} is smaller than the context of one request, {context_length}"
        )
    if asked is None:
        asked = min(context_length * settings.engine.parallel, max(context_length, LARGEST_DEFAULT_CONTEXT))
    from kiln.backends.llamacpp.runner import KV_GRANULE

    return -(-asked // KV_GRANULE) * KV_GRANULE


def host_cache_bytes(settings: Settings) -> int:
    """What prefixes of one model may take of the host's memory."""
    asked, limit_mb = settings.engine.host_cache_mib, settings.model.memory_limit_mb
    if asked is not None:
        return asked * 2**20
    return min((_memory() if limit_mb is None else limit_mb * 1_000_000) // 8, LARGEST_DEFAULT_HOST_CACHE)


def _memory() -> int:
    """Bytes of memory of the machine, or of the container that this runs in."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):
        # Not every system tells: what nearly every machine has.
        physical = 8 * 2**30
    try:
        return min(physical, int(CONTAINER_LIMIT.read_text()))
    except (OSError, ValueError):
        # No container, or "max": no limit.
        return physical


def threads(settings: Settings) -> int:
    if settings.engine.threads is not None:
        return settings.engine.threads
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
