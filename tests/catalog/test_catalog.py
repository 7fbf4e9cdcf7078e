"""The catalog over scripted sources: who waits for what, and what makes room for whom."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from kiln.chat.models.catalog import ModelCatalog
from kiln.chat.models.seat import LoadedModel, LoadProgress, Narrate
from kiln.chat.service import ChatService
from kiln.core.errors import DownloadError, ModelLoadError, ModelNotFound, ModelUnavailable, ShuttingDown
from kiln.engine.ports import EngineStats

MB = 1_000_000


class Engine:
    def stats(self) -> EngineStats:
        return EngineStats(1, 2, 3, 4, 5)


class Service:
    """What the catalog needs of a ChatService."""

    def __init__(self) -> None:
        self.is_idle = True
        self.closed = False
        self.engine = Engine()

    async def close(self) -> None:
        self.closed = True

    async def drain(self, grace_s: float) -> None: ...


class Source:
    """A model that takes as long to fetch and start as the test lets it."""

    def __init__(self, size: int = 10 * MB, error: Exception | None = None) -> None:
        self.size = size
        self.error = error
        self.fetches = self.starts = self.discards = 0
        self.cancelled = False
        self.fetched = asyncio.Event()
        self.started = asyncio.Event()
        self.services: list[Service] = []

    async def fetch(self, narrate: Narrate) -> Source:
        self.fetches += 1
        narrate(LoadProgress("downloading", 1, 2))
        try:
            await self.fetched.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if isinstance(self.error, DownloadError):
            raise self.error
        return self

    async def start(self) -> LoadedModel:
        self.starts += 1
        try:
            await self.started.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self.error is not None:
            raise self.error
        self.services.append(Service())
        return loaded(self.services[-1], self.size)

    async def discard(self) -> None:
        self.discards += 1

    def let_go(self) -> Source:
        self.fetched.set()
        self.started.set()
        return self


def loaded(service: Service, size: int = 10 * MB) -> LoadedModel:
    return LoadedModel(cast(ChatService, service), {"about": "it"}, size)


def catalog(limit: int | None = None, **sources: Source) -> ModelCatalog:
    return ModelCatalog("default", loaded(Service()), sources, memory_limit=limit)


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_true():
            await asyncio.sleep(0.005)


async def waiting(work: Awaitable[Any]) -> asyncio.Task[Any]:
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def test_the_default_is_ready_and_others_are_not_until_asked_for() -> None:
    models = catalog(a=Source().let_go())
    assert models.states() == {"default": "loaded", "a": "available"}
    lease = models.ready(None)
    assert lease is not None and lease.service is models.default.service
    assert models.ready("a") is None
    (await models.lease("a")).release()
    assert models.ready("a") is not None
    assert models.states()["a"] == "loaded"
    assert models.stats() == EngineStats(2, 4, 6, 8, 10)


async def test_an_unknown_model_is_refused_by_name() -> None:
    models = catalog()
    with pytest.raises(ModelNotFound, match="nope"):
        models.ready("nope")
    with pytest.raises(ModelNotFound):
        await models.lease("nope")


async def test_concurrent_requests_share_one_load_and_all_hear_of_it() -> None:
    source = Source()
    models = catalog(a=source)
    heard: list[list[LoadProgress]] = [[], [], []]
    waiters = [await waiting(models.lease("a", heard[i].append)) for i in range(2)]
    await until(lambda: source.fetches == 1)
    waiters.append(await waiting(models.lease("a", heard[2].append)))
    assert models.states()["a"] == "loading"
    source.let_go()
    leases = await asyncio.gather(*waiters)
    assert source.fetches == source.starts == 1
    assert len({id(lease.service) for lease in leases}) == 1
    phases = [[p.phase for p in heard_by] for heard_by in heard]
    # The late one hears at once how far it is.
    assert phases == [["downloading", "loading", "loading"]] * 3
    assert heard[0][-1] == LoadProgress("loading", source.size, source.size)


@pytest.mark.parametrize("error", [DownloadError("no network"), ModelLoadError("not a model")])
async def test_a_failed_load_fails_for_its_waiters_only_and_can_be_tried_again(error: Exception) -> None:
    source = Source(error=error).let_go()
    models = catalog(a=source, b=Source().let_go())
    results = await asyncio.gather(models.lease("a"), models.lease("a"), return_exceptions=True)
    assert [type(r) for r in results] == [ModelUnavailable] * 2
    assert "a could not be loaded" in str(results[0])
    assert models.states()["a"] == "available"
    (await models.lease("b")).release()
    assert models.ready(None) is not None
    source.error = None
    (await models.lease("a")).release()
    assert source.fetches == 2


@pytest.mark.parametrize("phase", ["fetch", "start"])
async def test_the_last_waiter_that_goes_breaks_the_load_off(phase: str) -> None:
    source = Source()
    if phase == "start":
        source.fetched.set()
    models = catalog(a=source)
    first, second = await waiting(models.lease("a")), await waiting(models.lease("a"))
    await until(lambda: source.fetches == 1 if phase == "fetch" else source.starts == 1)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert not source.cancelled
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    await until(lambda: source.cancelled)
    await until(lambda: models.states()["a"] == "available")
    source.let_go()
    (await models.lease("a")).release()


async def test_the_model_idle_longest_makes_room() -> None:
    a, b, c = (Source().let_go() for _ in range(3))
    models = catalog(30 * MB, a=a, b=b, c=c)
    for name in ("a", "b", "a"):
        (await models.lease(name)).release()
    (await models.lease("c")).release()
    assert models.states() == {"default": "loaded", "a": "loaded", "b": "available", "c": "loaded"}
    assert b.services[0].closed and not a.services[0].closed


async def test_a_model_at_work_is_not_unloaded() -> None:
    a, b = Source().let_go(), Source().let_go()
    models = catalog(20 * MB, a=a, b=b)
    lease = await models.lease("a")
    waiter = await waiting(models.lease("b"))
    await asyncio.sleep(0.1)
    assert not waiter.done() and models.states()["a"] == "loaded"
    a.services[0].is_idle = False
    lease.release()
    await asyncio.sleep(0.1)
    assert not waiter.done()
    a.services[0].is_idle = True
    (await waiter).release()
    assert models.states() == {"default": "loaded", "a": "available", "b": "loaded"}


async def test_a_model_that_never_fits_is_refused_with_the_figures() -> None:
    source = Source(25 * MB).let_go()
    models = catalog(30 * MB, a=source)
    with pytest.raises(ModelUnavailable, match="25 MB beside the default model's 10 MB; the limit is 30 MB"):
        await models.lease("a")
    assert source.discards == 1 and source.starts == 0


async def test_closing_breaks_loads_off_and_refuses_new_ones() -> None:
    source, other = Source(), Source().let_go()
    models = catalog(a=source, b=other)
    (await models.lease("b")).release()
    waiter = await waiting(models.lease("a"))
    await until(lambda: source.fetches == 1)
    await models.drain(0.0)
    await models.close()
    with pytest.raises(ShuttingDown):
        await waiter
    assert source.cancelled and other.services[0].closed
    with pytest.raises(ShuttingDown):
        await models.lease("a")
