"""The models of a server: the default one, and others that a request's `model` loads on demand.

A seat is a place for one model of the catalog. Whoever wants its service takes a lease; a seat that is
leased, or whose service has work, is never emptied. What is loaded beyond the memory limit displaces the
models that were idle longest. All requests for a model that is being loaded share the one load; when the
last of them goes, the load is broken off.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from kiln.chat.exchange.exchange import Exchange
from kiln.chat.models.seat import (
    Lease,
    LoadedModel,
    LoadProgress,
    ModelPlan,
    ModelSource,
    Narrate,
    Seat,
    State,
)
from kiln.chat.service import ChatService
from kiln.core.errors import (
    InternalError,
    KilnError,
    ModelNotFound,
    ModelUnavailable,
    SetupError,
    ShuttingDown,
)
from kiln.core.text import shorten
from kiln.engine.ports import EngineStats

log = logging.getLogger(__name__)

_POLL_S = 0.02


class ModelCatalog:
    """Lives on the event loop; only `ready` may be called on other threads.

    `memory_limit` bounds the bytes of all loaded models together, None = unbounded. The default model
    stays loaded.
    """

    def __init__(
        self,
        default_id: str,
        default: LoadedModel,
        sources: Mapping[str, ModelSource],
        *,
        memory_limit: int | None = None,
    ) -> None:
        self.created = int(time.time())
        self._default = Seat(default_id, None)
        self._default.loaded = default
        self._seats = {default_id: self._default, **{name: Seat(name, s) for name, s in sources.items()}}
        self._memory_limit = memory_limit
        self._making_room = asyncio.Lock()
        self._closed = False

    @property
    def default(self) -> LoadedModel:
        loaded = self._default.loaded
        assert loaded is not None
        return loaded

    @property
    def services(self) -> list[ChatService]:
        """The services of all loaded models, the default one first."""
        return [seat.loaded.service for seat in self._seats.values() if seat.loaded is not None]

    def states(self) -> dict[str, State]:
        """Every model's id and whether it is loaded, the default one first."""
        return {seat.id: seat.state for seat in self._seats.values()}

    def facts(self) -> dict[str, dict[str, Any]]:
        """What is known of each model, for `/v1/config`."""
        return {
            seat.id: {"state": seat.state, **(seat.loaded.facts if seat.loaded is not None else {})}
            for seat in self._seats.values()
        }

    def stats(self) -> EngineStats:
        """The counts of all loaded models' engines together."""
        return sum_stats(service.engine.stats() for service in self.services)

    def find(self, exchange_id: str) -> Exchange | None:
        """A live exchange by its id, whatever its model."""
        found = (service.find(exchange_id) for service in self.services)
        return next((exchange for exchange in found if exchange is not None), None)

    def ready(self, model: str | None) -> Lease | None:
        """A lease on a model that is loaded, None where it has to be loaded first. Safe on any thread.

        None means the default model. Raises ModelNotFound.
        """
        return self._seat(model).try_lease()

    async def lease(self, model: str | None, narrate: Narrate | None = None) -> Lease:
        """A lease on a model, which is loaded if need be; `narrate` hears of it on the event loop.

        Raises ModelNotFound, ModelUnavailable where it cannot be loaded, ShuttingDown.
        """
        seat = self._seat(model)
        while True:
            lease = seat.try_lease()
            if lease is not None:
                return lease
            if self._closed:
                raise ShuttingDown("the server is shutting down")
            await self._wait_for_load(seat, narrate)

    async def drain(self, grace_s: float) -> None:
        """Refuse new exchanges on all models, let running ones finish for `grace_s` seconds."""
        self._closed = True
        await asyncio.gather(*(service.drain(grace_s) for service in self.services))

    def hurry(self) -> None:
        """Let a drain wait no longer. May be called from a signal handler."""
        for service in self.services:
            service.hurry()

    async def close(self) -> None:
        """Break off loads and close every service. Drain before."""
        self._closed = True
        loads = [seat.load for seat in self._seats.values() if seat.load is not None]
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
        for seat in self._seats.values():
            if seat.loaded is not None:
                await seat.loaded.service.close()

    def _seat(self, model: str | None) -> Seat:
        if model is None:
            return self._default
        seat = self._seats.get(model)
        if seat is None:
            raise ModelNotFound(f"the model {shorten(model)} is not served here", param="model")
        return seat

    async def _wait_for_load(self, seat: Seat, narrate: Narrate | None) -> None:
        """Join the load of a seat, or begin it. The last who leaves breaks it off."""
        if seat.load is None:
            seat.load = asyncio.create_task(self._load(seat))
        load = seat.load
        waiter = seat.join(narrate)
        try:
            await asyncio.shield(load)
        except asyncio.CancelledError:
            if load.cancelled() and not _is_cancelled():
                raise ShuttingDown("the server is shutting down") from None
            raise
        finally:
            if seat.leave(waiter) and not load.done():
                load.cancel()
                seat.load = None

    async def _load(self, seat: Seat) -> None:
        """Fetch, make room, start. Whatever fails, fails for those who wait and for nobody else."""
        assert seat.source is not None
        plan: ModelPlan | None = None
        try:
            plan = await seat.source.fetch(seat.tell)
            seat.tell(LoadProgress("loading", 0, plan.size))
            async with self._making_room:
                await self._make_room(seat, plan.size)
                seat.reserved = plan.size
            starting, plan = plan, None
            loaded = await starting.start()
            seat.tell(LoadProgress("loading", loaded.size, loaded.size))
            seat.loaded = loaded
            log.info("the model %s is loaded", seat.id)
        except SetupError as error:
            log.error("the model %s could not be loaded: %s", seat.id, error.message)
            raise ModelUnavailable(
                f"the model {seat.id} could not be loaded: {error.message}", param="model", hint=error.hint
            ) from error
        except KilnError:
            raise
        except Exception as error:
            log.exception("loading the model %s failed", seat.id)
            raise InternalError(f"loading the model {seat.id} failed") from error
        finally:
            seat.reserved = 0
            if seat.load is asyncio.current_task():
                seat.load = None
            if plan is not None:
                await plan.discard()

    async def _make_room(self, seat: Seat, size: int) -> None:
        """Unload models that are idle, those used longest ago first, until `size` bytes fit the limit."""
        limit = self._memory_limit
        if limit is None:
            return
        if self.default.size + size > limit:
            raise ModelUnavailable(
                f"the model {seat.id} takes {_megabytes(size)} beside the default model's"
                f" {_megabytes(self.default.size)}; the limit is {_megabytes(limit)}",
                param="model",
                hint="Raise model.memory_limit_mb, or lower engine.host_cache_mib or the model's kv_size.",
            )
        while self._taken() + size > limit:
            idle = [s for s in self._seats.values() if s is not self._default and s.is_idle]
            if not idle:
                # Every model beside this one is at work: wait for one to end.
                await asyncio.sleep(_POLL_S)
                continue
            await self._unload(min(idle, key=lambda s: s.used))

    def _taken(self) -> int:
        return sum(s.reserved + (s.loaded.size if s.loaded is not None else 0) for s in self._seats.values())

    async def _unload(self, seat: Seat) -> None:
        loaded = seat.take_out()
        if loaded is not None:
            log.info("the model %s is unloaded to make room", seat.id)
            await loaded.service.close()


def sum_stats(stats: Iterable[EngineStats]) -> EngineStats:
    """Counts of several engines as those of one."""
    total = EngineStats(0, 0, 0, 0, 0)
    names = EngineStats.__struct_fields__
    for one in stats:
        total = EngineStats(**{name: getattr(total, name) + getattr(one, name) for name in names})
    return total


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"
