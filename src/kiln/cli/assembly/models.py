"""Loads models, and describes them for the use cases."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kiln.adapters.base import read_base
from kiln.adapters.registry import AdapterRegistry, no_adapters
from kiln.adapters.storage import Storage
from kiln.chat.embedding import Embedder
from kiln.chat.models.served import DEFAULT_MAX_TOKENS, ServedModel
from kiln.chat.structured.check import GrammarCheck
from kiln.cli.assembly.sizes import context_length, threads
from kiln.core.errors import ConfigError, ModelLoadError, RequestError
from kiln.core.sampling import SamplingOverrides, merge_sampling
from kiln.core.settings import Settings
from kiln.core.wording import reason
from kiln.text.reasoning import ReasoningTags, find_tags, probe_template
from kiln.text.template import ChatTemplate
from kiln.text.tool_calls import find_tool_format
from kiln.thinking.gate import CloseSequence

if TYPE_CHECKING:
    from kiln.backends.llamacpp import LlamaModel

BUNDLED = "tiny-reasoner"


def load_model(settings: Settings, *, vocabulary_only: bool = False) -> LlamaModel:
    """Load the configured GGUF, or the bundled one."""
    # libgomp reads this when it is loaded, so it must be set before llama.cpp is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", settings.engine.openmp_wait_policy)
    from kiln.backends.hub import resolve_model
    from kiln.backends.llamacpp import LlamaModel

    if settings.model.path is not None:
        path = resolve_model(settings.model.path)
    else:
        path = Path(str(files("kiln"))) / "models" / f"{BUNDLED}-f16.gguf"
    return LlamaModel(path, vocabulary_only=vocabulary_only)


def load_embedder(settings: Settings) -> Embedder | None:
    """Load the configured embedding model."""
    if settings.embedding.model_path is None:
        return None
    from kiln.backends.hub import resolve_model
    from kiln.backends.llamacpp.embedder import LlamaEmbedder

    path = resolve_model(settings.embedding.model_path)
    return LlamaEmbedder(path, pooling=settings.embedding.pooling, threads=threads(settings))


def describe_model(
    settings: Settings,
    llama: LlamaModel,
    engine_facts: Callable[[], Mapping[str, Any]] = dict,
) -> ServedModel:
    """What the use cases need to know about the loaded model.

    `engine_facts` are those of the engine that will compute it, once it has started.
    """
    from kiln.backends.identity import ModelIdentity

    source = _template_source(settings, llama)
    identity = ModelIdentity(llama, source)
    tags = _tags(settings, source)
    tool_format = find_tool_format(source)
    markers = None if tool_format is None else tool_format.markers
    extra = [text for pair in (tags, markers) if pair is not None for text in (pair.open, pair.close) if text]
    template = ChatTemplate(
        source,
        bos_text=llama.bos_text,
        eos_text=llama.eos_text,
        added_spellings=llama.added_spellings,
        control_spellings=llama.control_spellings,
        extra_spellings=[text for text in extra if text not in llama.added_spellings],
    )
    probed = probe_template(template, tags)
    seeding = settings.model.seed_open_tag
    sampling = settings.sampling
    shown = {text.encode() for text in (*extra, *(tool_format.texts if tool_format is not None else ()))}
    served_id = settings.server.served_model_id or (
        BUNDLED if settings.model.path is None else llama.path.stem
    )
    return ServedModel(
        id=served_id,
        created=int(time.time()),
        tokenizer=llama,
        bos_id=llama.bos_id,
        template=template,
        context_length=context_length(settings, llama),
        tags=tags,
        close=None if tags is None else CloseSequence.of(llama.encode(tags.close), tags.close.encode()),
        template_thinking=probed,
        seeds_open_tag=seeding == "always" or (seeding == "auto" and probed.leaves_open_to_model),
        tool_format=tool_format,
        # Control tokens are never text, unless the scanner needs to see them.
        hidden_ids=frozenset(t for t in llama.control_ids if not _is_part_of_any(llama.pieces[t], shown)),
        sampling_defaults=merge_sampling(SamplingOverrides.of(sampling), llama.sampling_defaults),
        max_tokens_default=DEFAULT_MAX_TOKENS if sampling.max_tokens is None else sampling.max_tokens,
        budget_tokens_default=settings.server.default_thinking_budget_tokens,
        budget_ms_default=settings.server.default_thinking_budget_ms,
        thinking_default=settings.server.default_thinking_enabled,
        policy=cache(
            lambda: identity.policy(
                served_id,
                context_length=context_length(settings, llama),
                threads=threads(settings),
                exactness={"requests": settings.engine.exact, **_findings(engine_facts())},
            )
        ),
        longest_piece=max(1, *(len(piece) for piece in llama.pieces)),
        grammars=GrammarCheck(llama),
        exact=settings.engine.exact,  # type: ignore[arg-type]
        adapters=_adapters(settings, llama),
    )


def _findings(engine_facts: Mapping[str, Any]) -> dict[str, object]:
    """What the self-test of exactness found, without the sentence about it."""
    exactness = engine_facts.get("exactness", {})
    return {name: found for name, found in exactness.items() if name != "detail"}


def _adapters(settings: Settings, llama: LlamaModel) -> AdapterRegistry:
    """The adapters of the configured directory. Raises ConfigError where it, or the default one, is wrong."""
    model = settings.model
    if model.adapter_dir is None:
        if model.adapter is not None:
            raise ConfigError("model.adapter is set, but there is no model.adapter_dir")
        return no_adapters()
    converted = None if model.adapter_cache_dir is None else Path(model.adapter_cache_dir)
    storage = Storage(Path(model.adapter_dir), converted=converted, quota=model.adapter_quota_bytes)
    registry = AdapterRegistry(storage, lambda: read_base(llama.path), max_bytes=model.adapter_max_bytes)
    registry.start()
    try:
        registry.load_default(model.adapter)
    except RequestError as error:
        registry.close()
        raise ConfigError(f"model.adapter = {model.adapter!r}: {error.message}") from None
    return registry


def _template_source(settings: Settings, llama: LlamaModel) -> str:
    path = settings.model.chat_template_file
    if path is not None:
        try:
            return Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"model.chat_template_file = {path!r} cannot be read: {reason(error)}"
            ) from None
    if llama.chat_template is None:
        raise ModelLoadError(
            f"{llama.path} carries no chat template", hint="Set model.chat_template_file to a Jinja template."
        )
    return llama.chat_template


def _tags(settings: Settings, template_source: str) -> ReasoningTags | None:
    opening, closing = settings.model.reasoning_open, settings.model.reasoning_close
    if (opening is None) != (closing is None):
        raise ConfigError("model.reasoning_open and model.reasoning_close must be set together")
    if opening is not None and closing is not None:
        return ReasoningTags(opening, closing)
    return find_tags(template_source)


def _is_part_of_any(piece: bytes, texts: set[bytes]) -> bool:
    return any(piece in text for text in texts)
