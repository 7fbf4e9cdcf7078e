"""Puts the parts together. The only module that names concrete backends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.applications import Starlette

from kiln.adapters.base import read_base
from kiln.adapters.registry import AdapterRegistry, no_adapters
from kiln.adapters.storage import Storage
from kiln.chat.catalog import LoadedModel, LoadProgress, ModelCatalog, ModelPlan, Narrate
from kiln.chat.embedding import Embedder, EmbeddingService
from kiln.chat.observe import Observer, Observers
from kiln.chat.served import DEFAULT_MAX_TOKENS, ServedModel
from kiln.chat.service import ChatService
from kiln.chat.stats import Statistics
from kiln.cli.access import Access, open_memory
from kiln.cli.extensions import load_filter
from kiln.cli.facts import facts
from kiln.core.errors import ConfigError, DownloadError, ModelLoadError, RequestError, SetupError
from kiln.core.sampling import SamplingOverrides
from kiln.core.settings import Settings
from kiln.engine.cache import CachingEngine
from kiln.engine.grammar import GrammarCompiler
from kiln.engine.loop import BatchingEngine
from kiln.engine.messages import EngineLimits
from kiln.engine.ports import Engine, ModelRunner
from kiln.engine.process import ProcessEngine, RunnerPlan
from kiln.http.app import build_app
from kiln.http.metrics import Metrics
from kiln.http.state import ServerState
from kiln.skills.start import open_libraries
from kiln.text.files import FileReader
from kiln.text.reasoning import ReasoningTags, find_tags, probe_template
from kiln.text.template import ChatTemplate
from kiln.text.tool_calls import find_tool_format
from kiln.thinking.gate import CloseSequence
from kiln.tools.build import toolbox_from

if TYPE_CHECKING:
    from kiln.backends.llamacpp import LlamaModel

BUNDLED = "tiny-reasoner"
LARGEST_DEFAULT_CONTEXT = 32768
# llama.cpp has at most 256 sequences a context; two are for padding rows and the dead.
MAX_SEQUENCES = 254


def create_app(settings: Settings) -> Starlette:
    """The application over the configured model. Raises SetupError where the model cannot be loaded.

    The lifespan starts and stops the engines: in processes of their own, where this one only loads the
    vocabularies, or inline on threads, over weights that are loaded here.
    """
    return _app(_assemble(settings))


def app_over(
    settings: Settings, llama: LlamaModel, model: ServedModel, make_runner: Callable[[], ModelRunner]
) -> Starlette:
    """The application with an inline engine over a loaded model (tests script the runner)."""
    return app_with(settings, llama, model, _inline_engine(settings, llama, model, make_runner))


def app_with(settings: Settings, llama: LlamaModel, model: ServedModel, engine: Engine) -> Starlette:
    """The application with an engine of the caller's making."""
    return _app(_with_cache(settings, llama, model, engine))


@dataclass(frozen=True, slots=True)
class _Assembled:
    """A model with its engine, which has not been started. Its vocabulary is loaded."""

    settings: Settings
    llama: LlamaModel
    model: ServedModel
    engine: Engine
    cache: CachingEngine | None

    @property
    def size(self) -> int:
        """Bytes that weights and KV cache take."""
        cells = _kv_cells(self.settings, self.model.context_length)
        return self.llama.file_size + cells * self.llama.kv_bytes_per_token

    async def start(self, observer: Observer) -> LoadedModel:
        """Start the engine. Raises the SetupError that it failed with, having freed everything."""
        try:
            await self.engine.start()
        except BaseException:
            await self.discard()
            raise
        service = ChatService(
            self.model,
            self.engine,
            observer,
            request_timeout_s=self.settings.engine.request_timeout_s,
        )
        found = facts(
            self.settings,
            self.model,
            self.llama,
            kv_cells=_kv_cells(self.settings, self.model.context_length),
            threads=_threads(self.settings),
        )
        found["engine"] = {**found["engine"], **self.engine.facts}
        return LoadedModel(service, found, self.size)

    async def discard(self) -> None:
        self.model.adapters.close()
        await asyncio.to_thread(self.llama.close)


def _assemble(settings: Settings) -> _Assembled:
    """Load a model's vocabulary, or all of it for an inline engine, and put its engine together."""
    inline = settings.engine.mode == "inline"
    llama = load_model(settings, vocabulary_only=not inline)
    try:
        model = describe_model(settings, llama)
        if inline:
            engine = _inline_engine(settings, llama, model, lambda: _make_runner(settings, llama, model))
        else:
            engine = _process_engine(settings, llama, model)
    except BaseException:
        llama.close()
        raise
    return _with_cache(settings, llama, model, engine)


def _with_cache(settings: Settings, llama: LlamaModel, model: ServedModel, engine: Engine) -> _Assembled:
    entries = settings.engine.completion_cache
    cache = CachingEngine(engine, entries) if entries > 0 else None
    return _Assembled(settings, llama, model, engine if cache is None else cache, cache)


def _process_engine(settings: Settings, llama: LlamaModel, model: ServedModel) -> Engine:
    return ProcessEngine(
        # -P: modules are not looked for in the working directory.
        [sys.executable, "-P", "-m", "kiln.backends.engine_host"],
        RunnerPlan(
            model_path=str(llama.path),
            sequences=_sequences(settings),
            kv_cells=_kv_cells(settings, model.context_length),
            threads=_threads(settings),
            adapters=settings.engine.adapters_loaded,
            limits=_engine_limits(settings),
            log_level=settings.server.log_level,
        ),
        context_length=model.context_length,
        max_queue=settings.engine.max_queue,
        environment=_child_environment(settings),
        hang_timeout_s=settings.engine.hang_timeout_s,
        on_stopped=llama.close,
    )


def _inline_engine(
    settings: Settings, llama: LlamaModel, model: ServedModel, make_runner: Callable[[], ModelRunner]
) -> Engine:
    limits = _engine_limits(settings)
    return BatchingEngine(
        make_runner,
        pieces=llama.pieces,
        context_length=model.context_length,
        parallel=limits.parallel,
        step_tokens=limits.step_tokens,
        stall_tokens=limits.stall_tokens,
        retain_tokens=limits.retain_tokens,
        turn_steps=limits.turn_steps,
        draft_tokens=limits.draft_tokens,
        checks_books=limits.checks_books,
        host_bytes=limits.host_bytes,
        max_queue=settings.engine.max_queue,
        grammars=GrammarCompiler(llama),
        on_stopped=llama.close,
    )


def _app(default: _Assembled) -> Starlette:
    settings = default.settings
    skills, agents = open_libraries(settings)

    async def start() -> ServerState:
        statistics = Statistics()
        # The catalog is made below: the metrics ask it only when they are rendered.
        metrics = Metrics(lambda: catalog.stats(), default.cache.counts if default.cache is not None else {})
        observer = Observers([metrics, statistics])
        try:
            await access.open()
            embedder = await asyncio.to_thread(_embedder, settings)
            loaded = await default.start(observer)
        except SetupError as error:
            app.state.failure = error
            raise
        sources = {name: _Source(settings, name, observer) for name in settings.models}
        limit = settings.model.memory_limit_mb
        catalog = ModelCatalog(
            default.model.id,
            loaded,
            sources,
            memory_limit=None if limit is None else limit * 1_000_000,
        )
        return ServerState(
            settings,
            catalog,
            metrics,
            statistics,
            access.policy,
            open_memory(settings, catalog, embedder),
            skills=skills,
            agents=agents,
            toolbox=toolbox_from(settings),
            files=FileReader(settings.files),
            content_filter=content_filter,
            embeddings=EmbeddingService(embedder),
        )

    content_filter = load_filter(settings)
    access = Access(settings)
    app = build_app(start, cors_origins=access.cors_origins)
    return app


class _Source:
    """A model of the catalog, `[models.<name>]`. Implements `ModelSource`."""

    def __init__(self, settings: Settings, name: str, observer: Observer) -> None:
        self._settings = settings.for_model(name)
        self._observer = observer

    async def fetch(self, narrate: Narrate) -> ModelPlan:
        """Download the file unless it is here, and load the vocabulary."""
        loop = asyncio.get_running_loop()
        left = threading.Event()

        def report(name: str, done: int, total: int | None) -> None:
            if left.is_set():
                raise DownloadError("nobody waits for this download any more")
            loop.call_soon_threadsafe(narrate, LoadProgress("downloading", done, total))

        def find_and_assemble() -> _Assembled:
            from kiln.backends.hub import resolve_model

            reference = self._settings.model.path
            assert reference is not None
            path = resolve_model(reference, progress=report)
            model = replace(self._settings.model, path=str(path))
            return _assemble(replace(self._settings, model=model))

        work = asyncio.ensure_future(asyncio.to_thread(find_and_assemble))
        try:
            assembled = await asyncio.shield(work)
        except asyncio.CancelledError:
            # The thread ends at the download's next report, or has a vocabulary to give back.
            left.set()
            with contextlib.suppress(SetupError):
                await (await work).discard()
            raise
        return _Plan(assembled, self._observer)


class _Plan:
    """An assembled model of the catalog. Implements `ModelPlan`."""

    def __init__(self, assembled: _Assembled, observer: Observer) -> None:
        self.size = assembled.size
        self._assembled = assembled
        self._observer = observer

    async def start(self) -> LoadedModel:
        return await self._assembled.start(self._observer)

    async def discard(self) -> None:
        await self._assembled.discard()


def _make_runner(settings: Settings, llama: LlamaModel, model: ServedModel) -> ModelRunner:
    from kiln.backends.llamacpp import LlamaRunner

    return LlamaRunner(
        llama,
        sequences=_sequences(settings),
        kv_cells=_kv_cells(settings, model.context_length),
        threads=_threads(settings),
        adapters=settings.engine.adapters_loaded,
    )


def _engine_limits(settings: Settings) -> EngineLimits:
    engine = settings.engine
    return EngineLimits(
        engine.parallel,
        engine.step_tokens,
        engine.stall_tokens,
        engine.retain_tokens,
        engine.adapter_turn_steps,
        engine.speculation_tokens if engine.speculation else 0,
        engine.checks_books,
        engine.host_cache_mib * 2**20,
    )


def _sequences(settings: Settings) -> int:
    """Resident sequences: as many again as may run retain the prefixes of requests that have ended."""
    return min(2 * settings.engine.parallel, MAX_SEQUENCES)


def _child_environment(settings: Settings) -> dict[str, str]:
    return {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", settings.engine.openmp_wait_policy)}


def _embedder(settings: Settings) -> Embedder | None:
    """Load the configured embedding model."""
    if settings.embedding.model_path is None:
        return None
    from kiln.backends.embedder import LlamaEmbedder
    from kiln.backends.hub import resolve_model

    path = resolve_model(settings.embedding.model_path)
    return LlamaEmbedder(path, pooling=settings.embedding.pooling, threads=_threads(settings))


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


def describe_model(settings: Settings, llama: LlamaModel) -> ServedModel:
    """What the use cases need to know about the loaded model."""
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
    configured = SamplingOverrides(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
    )
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
        context_length=_context_length(settings, llama),
        tags=tags,
        close=None if tags is None else CloseSequence.of(llama.encode(tags.close), tags.close.encode()),
        template_thinking=probed,
        seeds_open_tag=seeding == "always" or (seeding == "auto" and probed.leaves_open_to_model),
        tool_format=tool_format,
        # Control tokens are never text, unless the scanner needs to see them.
        hidden_ids=frozenset(t for t in llama.control_ids if not _is_part_of_any(llama.pieces[t], shown)),
        sampling_defaults=merge_sampling(configured, llama.sampling_defaults),
        max_tokens_default=DEFAULT_MAX_TOKENS if sampling.max_tokens is None else sampling.max_tokens,
        budget_tokens_default=settings.server.default_thinking_budget_tokens,
        budget_ms_default=settings.server.default_thinking_budget_ms,
        thinking_default=settings.server.default_thinking_enabled,
        policy=cache(
            lambda: identity.policy(
                served_id, context_length=_context_length(settings, llama), threads=_threads(settings)
            )
        ),
        longest_piece=max(1, *(len(piece) for piece in llama.pieces)),
        grammars=GrammarCompiler(llama, checks_only=True),
        exact=settings.engine.exact,  # type: ignore[arg-type]
        adapters=_adapters(settings, llama),
    )


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


def merge_sampling(*sources: SamplingOverrides) -> SamplingOverrides:
    """The first source that states a dimension decides it."""
    names = SamplingOverrides.__slots__
    stated = {n: next((v for s in sources if (v := getattr(s, n)) is not None), None) for n in names}
    return SamplingOverrides(**stated)


def _template_source(settings: Settings, llama: LlamaModel) -> str:
    path = settings.model.chat_template_file
    if path is not None:
        try:
            return Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"model.chat_template_file = {path!r} cannot be read: {error}") from None
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


def _context_length(settings: Settings, llama: LlamaModel) -> int:
    asked = settings.engine.ctx_size
    if asked is not None and asked > llama.train_context:
        raise ConfigError(
            f"engine.ctx_size = {asked} exceeds the {llama.train_context} tokens the model was trained for"
        )
    return asked if asked is not None else min(llama.train_context, LARGEST_DEFAULT_CONTEXT)


def _kv_cells(settings: Settings, context_length: int) -> int:
    asked = settings.engine.kv_size
    if asked is not None and asked < context_length:
        raise ConfigError(
            f"engine.kv_size = {asked} is smaller than the context of one request, {context_length}"
        )
    if asked is None:
        asked = min(context_length * settings.engine.parallel, max(context_length, LARGEST_DEFAULT_CONTEXT))
    from kiln.backends.llamacpp import KV_GRANULE

    return -(-asked // KV_GRANULE) * KV_GRANULE


def _threads(settings: Settings) -> int:
    if settings.engine.threads is not None:
        return settings.engine.threads
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
