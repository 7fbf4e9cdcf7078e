"""Sizes that follow from the settings and the model: context, KV cache, sequences, threads."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kiln.core.errors import ConfigError
from kiln.core.settings import Settings

if TYPE_CHECKING:
    from kiln.backends.llamacpp import LlamaModel


LARGEST_DEFAULT_CONTEXT = 32768
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


def threads(settings: Settings) -> int:
    if settings.engine.threads is not None:
        return settings.engine.threads
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
