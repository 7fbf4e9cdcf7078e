"""A model and its engine, put together and not yet started."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kiln.chat.models.seat import LoadedModel
from kiln.chat.models.served import ServedModel
from kiln.chat.service import ChatService
from kiln.chat.telemetry.observe import Observer
from kiln.cli.assembly.facts import facts
from kiln.cli.assembly.models import describe_model, load_model
from kiln.cli.assembly.sizes import host_cache_bytes, kv_cells, sequences, threads
from kiln.core.settings import Settings
from kiln.engine.cache import CachingEngine
from kiln.engine.loop import BatchingEngine
from kiln.engine.messages import EngineLimits
from kiln.engine.ports import Engine
from kiln.engine.process.frames import RunnerPlan
from kiln.engine.process.supervisor import ProcessEngine
from kiln.engine.runner import ModelRunner
from kiln.engine.sampling.grammar import GrammarCompiler

if TYPE_CHECKING:
    from kiln.backends.llamacpp import LlamaModel


@dataclass(frozen=True, slots=True)
class Assembled:
    """A model with its engine, which has not been started. Its vocabulary is loaded."""

    settings: Settings
    llama: LlamaModel
    model: ServedModel
    engine: Engine
    cache: CachingEngine | None

    @property
    def size(self) -> int:
        """Bytes that weights and KV cache take, and at most the prefixes in the host's memory."""
        cells = kv_cells(self.settings, self.model.context_length)
        kv = cells * self.llama.kv_bytes_per_token
        return self.llama.file_size + kv + host_cache_bytes(self.settings)

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
            kv_cells=kv_cells(self.settings, self.model.context_length),
            threads=threads(self.settings),
        )
        found["engine"] = {**found["engine"], **self.engine.facts}
        return LoadedModel(service, found, self.size)

    async def discard(self) -> None:
        self.model.adapters.close()
        await asyncio.to_thread(self.llama.close)


def assemble(settings: Settings) -> Assembled:
    """Load a model's vocabulary, or all of it for an inline engine, and put its engine together."""
    inline = settings.engine.mode == "inline"
    llama = load_model(settings, vocabulary_only=not inline)
    try:
        model = describe_model(settings, llama, lambda: engine.facts)
        engine: Engine
        if inline:
            engine = inline_engine(settings, llama, model, lambda: _make_runner(settings, llama, model))
        else:
            engine = _process_engine(settings, llama, model)
    except BaseException:
        llama.close()
        raise
    return with_cache(settings, llama, model, engine)


def with_cache(settings: Settings, llama: LlamaModel, model: ServedModel, engine: Engine) -> Assembled:
    entries = settings.engine.completion_cache
    exact = settings.engine.exact != "never"
    cache = CachingEngine(engine, entries, exact=exact) if entries > 0 else None
    return Assembled(settings, llama, model, engine if cache is None else cache, cache)


def _process_engine(settings: Settings, llama: LlamaModel, model: ServedModel) -> Engine:
    return ProcessEngine(
        # -P: modules are not looked for in the working directory.
        [sys.executable, "-P", "-m", "kiln.backends.engine_host"],
        RunnerPlan(
            model_path=str(llama.path),
            sequences=sequences(settings),
            kv_cells=kv_cells(settings, model.context_length),
            threads=threads(settings),
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


def inline_engine(
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


def _make_runner(settings: Settings, llama: LlamaModel, model: ServedModel) -> ModelRunner:
    from kiln.backends.llamacpp import LlamaRunner

    return LlamaRunner(
        llama,
        sequences=sequences(settings),
        kv_cells=kv_cells(settings, model.context_length),
        threads=threads(settings),
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
        host_cache_bytes(settings),
    )


def _child_environment(settings: Settings) -> dict[str, str]:
    wanted = {
        "OMP_WAIT_POLICY": settings.engine.openmp_wait_policy,
        # Graphs are planned anew with every change of adapters: their memory goes back to the system at
        # once, else glibc keeps holes of up to 50 MB. A fixed threshold is what turns that off.
        "MALLOC_MMAP_THRESHOLD_": str(4 * 2**20),
    }
    return {name: os.environ.get(name, value) for name, value in wanted.items()}
