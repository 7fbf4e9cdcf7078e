"""Puts the parts together. The only package that names concrete backends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.applications import Starlette

from kiln.chat.embedding import EmbeddingService
from kiln.chat.models.catalog import ModelCatalog
from kiln.chat.models.served import ServedModel
from kiln.chat.telemetry.observe import Observers
from kiln.chat.telemetry.stats import Statistics
from kiln.cli.access import Access, open_memory
from kiln.cli.assembly.engines import Assembled, assemble, inline_engine, with_cache
from kiln.cli.assembly.extensions import load_filter
from kiln.cli.assembly.models import BUNDLED, describe_model, load_embedder, load_model
from kiln.cli.assembly.sources import CatalogSource
from kiln.core.errors import SetupError
from kiln.core.settings import Settings
from kiln.engine.ports import Engine
from kiln.engine.runner import ModelRunner
from kiln.http.app import build_app
from kiln.http.metrics import Metrics
from kiln.http.state import ServerState
from kiln.skills.start import open_libraries
from kiln.text.files import FileReader
from kiln.tools.build import toolbox_from

if TYPE_CHECKING:
    from kiln.backends.llamacpp import LlamaModel

__all__ = ["BUNDLED", "app_over", "app_with", "create_app", "describe_model", "load_model"]


def create_app(settings: Settings) -> Starlette:
    """The application over the configured model. Raises SetupError where the model cannot be loaded.

    The lifespan starts and stops the engines: in processes of their own, where this one only loads the
    vocabularies, or inline on threads, over weights that are loaded here.
    """
    return _app(assemble(settings))


def app_over(
    settings: Settings, llama: LlamaModel, model: ServedModel, make_runner: Callable[[], ModelRunner]
) -> Starlette:
    """The application with an inline engine over a loaded model (tests script the runner)."""
    return app_with(settings, llama, model, inline_engine(settings, llama, model, make_runner))


def app_with(settings: Settings, llama: LlamaModel, model: ServedModel, engine: Engine) -> Starlette:
    """The application with an engine of the caller's making."""
    return _app(with_cache(settings, llama, model, engine))


def _app(default: Assembled) -> Starlette:
    settings = default.settings
    skills, agents = open_libraries(settings)

    async def start() -> ServerState:
        statistics = Statistics()
        # The catalog is made below: the metrics ask it only when they are rendered.
        metrics = Metrics(lambda: catalog.stats(), default.cache.counts if default.cache is not None else {})
        observer = Observers([metrics, statistics])
        try:
            await access.open()
            embedder = await asyncio.to_thread(load_embedder, settings)
            loaded = await default.start(observer)
        except SetupError as error:
            app.state.failure = error
            raise
        sources = {name: CatalogSource(settings, name, observer) for name in settings.models}
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
