"""From a request body to a prepared turn at the service of the model it names."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

from starlette.requests import Request

from kiln.chat.models.seat import Lease
from kiln.chat.service import ChatService
from kiln.core.errors import ModelNotFound
from kiln.http.counting import note_begun
from kiln.http.sse import unless_disconnected
from kiln.http.state import ServerState


class NamesModel(Protocol):
    """A decoded request body."""

    @property
    def model(self) -> str | None: ...


W = TypeVar("W", bound=NamesModel)
P = TypeVar("P")


@asynccontextmanager
async def admitted(
    state: ServerState,
    request: Request,
    decode: Callable[[], W],
    prepare: Callable[[W, ChatService], P],
) -> AsyncIterator[tuple[ChatService, P]]:
    """The service and what `prepare` made for it; start the exchange inside the context. Where that has
    gone well the turn has begun.

    Both functions run on a worker thread, in one go where the model is loaded. The body must have been
    read. Raises what they raise, ModelNotFound, ModelUnavailable, and ClientDisconnect.
    """
    held = _Held()

    def decode_and_prepare() -> tuple[W, ChatService | None, P | None]:
        wire = decode()
        try:
            lease = state.catalog.ready(wire.model)
        except ModelNotFound:
            # Preparing it for the default model ends the same way, and has the refusal counted.
            prepare(wire, state.service)
            raise
        if lease is None:
            return wire, None, None
        service = held.keep(lease)
        return wire, service, prepare(wire, service)

    async def admit() -> tuple[ChatService, P]:
        wire, service, prepared = await state.service.in_worker(decode_and_prepare)
        if service is None:
            loaded = held.keep(await state.catalog.lease(wire.model))
            return loaded, await loaded.in_worker(lambda: prepare(wire, loaded))
        assert prepared is not None
        return service, prepared

    try:
        yield await unless_disconnected(request.receive, admit())
        note_begun(request)
    finally:
        held.release()


class _Held:
    """The leases of one request. One that a worker takes after the request has gone is given back at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: list[Lease] | None = []

    def keep(self, lease: Lease) -> ChatService:
        with self._lock:
            if self._leases is not None:
                self._leases.append(lease)
                return lease.service
        lease.release()
        return lease.service

    def release(self) -> None:
        with self._lock:
            leases, self._leases = self._leases, None
        for lease in leases or ():
            lease.release()
