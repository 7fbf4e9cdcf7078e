"""A place for one model of the catalog: what is loaded of it, who holds it, who waits for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol

from kiln.chat.service import ChatService

State = Literal["loaded", "loading", "available"]


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a model is. `done` and `total` are bytes; None where nobody knows."""

    phase: Literal["downloading", "loading"]
    done: int | None = None
    total: int | None = None


Narrate = Callable[[LoadProgress], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that serves. `size` is what its weights and KV cache take, in bytes."""

    service: ChatService
    facts: dict[str, Any]
    size: int


class ModelPlan(Protocol):
    """A model whose file is here. `size` as in LoadedModel."""

    size: int

    async def start(self) -> LoadedModel:
        """Load the weights. Raises the SetupError that it failed with, having freed everything."""
        ...

    async def discard(self) -> None:
        """Free what the plan holds, without starting it."""
        ...


class ModelSource(Protocol):
    """Where a model of the catalog comes from."""

    async def fetch(self, narrate: Narrate) -> ModelPlan:
        """Have the file here, downloading it if need be. Raises a SetupError; stops when cancelled."""
        ...


class Lease:
    """The right to a loaded model's service. Release it when the exchange has started or failed."""

    def __init__(self, seat: Seat, service: ChatService) -> None:
        self.service = service
        self._seat: Seat | None = seat

    def release(self) -> None:
        """Idempotent. May be called on any thread."""
        seat, self._seat = self._seat, None
        if seat is not None:
            seat.give_back()

    def __enter__(self) -> ChatService:
        return self.service

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Seat:
    """One model of the catalog: what is loaded of it, who holds it, who waits for it."""

    def __init__(self, model_id: str, source: ModelSource | None) -> None:
        self.id = model_id
        self.source = source
        self.loaded: LoadedModel | None = None
        self.load: asyncio.Task[None] | None = None
        # Bytes that a load in progress has been granted.
        self.reserved = 0
        self.used = 0.0
        self._holds = 0
        self._lock = threading.Lock()
        self._waiters: dict[object, Narrate | None] = {}
        self._told: LoadProgress | None = None

    @property
    def state(self) -> State:
        if self.loaded is not None:
            return "loaded"
        return "available" if self.load is None else "loading"

    @property
    def is_idle(self) -> bool:
        with self._lock:
            return self.loaded is not None and self._holds == 0 and self.loaded.service.is_idle

    def try_lease(self) -> Lease | None:
        with self._lock:
            if self.loaded is None:
                return None
            self._holds += 1
            self.used = time.monotonic()
            return Lease(self, self.loaded.service)

    def give_back(self) -> None:
        with self._lock:
            self._holds -= 1
            self.used = time.monotonic()

    def take_out(self) -> LoadedModel | None:
        """Empty the seat, unless somebody took a lease in the meantime."""
        with self._lock:
            if self.loaded is None or self._holds > 0 or not self.loaded.service.is_idle:
                return None
            loaded, self.loaded = self.loaded, None
            return loaded

    def join(self, narrate: Narrate | None) -> object:
        waiter = object()
        self._waiters[waiter] = narrate
        if narrate is not None and self._told is not None:
            narrate(self._told)
        return waiter

    def leave(self, waiter: object) -> bool:
        """Whether that was the last one."""
        del self._waiters[waiter]
        if not self._waiters:
            self._told = None
        return not self._waiters

    def tell(self, progress: LoadProgress) -> None:
        self._told = progress
        for narrate in self._waiters.values():
            if narrate is not None:
                narrate(progress)
