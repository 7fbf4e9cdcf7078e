"""What `/v1/config` says of a model: everything that was resolved rather than stated."""

from __future__ import annotations

from typing import Any, Protocol

from kiln import __version__
from kiln.chat.models.served import ServedModel
from kiln.cli.assembly.sizes import host_cache_bytes
from kiln.core.sampling import SamplingOverrides, SamplingParams, resolve_sampling
from kiln.core.settings import Settings


class ModelFile(Protocol):
    """What the facts need to know of a model's file."""

    @property
    def name(self) -> str: ...

    @property
    def n_vocab(self) -> int: ...

    @property
    def train_context(self) -> int: ...

    @property
    def sampling_defaults(self) -> SamplingOverrides: ...


def facts(
    settings: Settings, model: ServedModel, file: ModelFile, *, kv_cells: int, threads: int
) -> dict[str, Any]:
    """The resolved part of `/v1/config` for one model."""
    sampling = resolve_sampling(model.sampling_defaults)
    return {
        "version": __version__,
        "model": {
            "id": model.id,
            "name": file.name,
            "vocabulary": file.n_vocab,
            "trained_context": file.train_context,
        },
        "engine": {
            "context_length": model.context_length,
            "kv_cells": kv_cells,
            "host_cache_mib": host_cache_bytes(settings) // 2**20,
            "parallel": settings.engine.parallel,
            "exact": settings.engine.exact,
            "threads": threads,
        },
        "thinking": {
            "open_tag": model.tags.open if model.tags else None,
            "close_tag": model.tags.close if model.tags else None,
            "close_token_ids": list(model.close.ids) if model.close else None,
            "default_enabled": model.thinks_by_default,
            "template_can_toggle": model.template_thinking.can_toggle,
            "seeds_open_tag": model.seeds_open_tag,
            "default_budget_tokens": model.budget_tokens_default,
            "default_budget_ms": model.budget_ms_default,
        },
        "sampling": {
            **{name: getattr(sampling, name) for name in SamplingParams.__slots__},
            "max_tokens": model.max_tokens_default,
            "sources": _sampling_sources(settings, file),
        },
    }


def _sampling_sources(settings: Settings, file: ModelFile) -> dict[str, str]:
    carried = file.sampling_defaults
    sources = {}
    for name in SamplingParams.__slots__:
        if getattr(settings.sampling, name) is not None:
            sources[name] = settings.sources.get(f"sampling.{name}", "default")
        else:
            sources[name] = "model" if getattr(carried, name) is not None else "default"
    sources["max_tokens"] = settings.sources.get("sampling.max_tokens", "default")
    return sources
