"""Models of the catalog: how they get here and come to serve."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import replace

from kiln.chat.models.seat import LoadedModel, LoadProgress, ModelPlan, Narrate
from kiln.chat.telemetry.observe import Observer
from kiln.cli.assembly.engines import Assembled, assemble
from kiln.core.errors import DownloadError, SetupError
from kiln.core.settings import Settings


class CatalogSource:
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

        def find_and_assemble() -> Assembled:
            from kiln.backends.hub import resolve_model

            reference = self._settings.model.path
            assert reference is not None
            path = resolve_model(reference, progress=report)
            model = replace(self._settings.model, path=str(path))
            return assemble(replace(self._settings, model=model))

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

    def __init__(self, assembled: Assembled, observer: Observer) -> None:
        self.size = assembled.size
        self._assembled = assembled
        self._observer = observer

    async def start(self) -> LoadedModel:
        return await self._assembled.start(self._observer)

    async def discard(self) -> None:
        await self._assembled.discard()
