"""A server inside this process, for a chat without one."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from kiln.core.errors import ModelLoadError
from kiln.core.settings import Settings
from kiln.http.connection import protocol_within

STOP_WITHIN_S = 10.0


@contextmanager
def embedded_server(settings: Settings) -> Iterator[str]:
    """Serve on a free loopback port as long as the context lasts; gives the base URL.

    Raises what the app's start-up raised (a SetupError where the model cannot be loaded).
    """
    from kiln.cli import assembly

    # Reachable on loopback only, whatever server.host says of `kiln serve`: no key is needed.
    server = replace(settings.server, host="127.0.0.1")
    settings = replace(settings, server=server, auth=replace(settings.auth, anonymous=True))
    app = assembly.create_app(settings)
    with serve_app(app, protocol_within(server, app)) as url:
        yield url


@contextmanager
def serve_app(app: ASGIApp, http: type[asyncio.Protocol] | None = None) -> Iterator[str]:
    """Run an ASGI app under uvicorn on a thread of its own; gives the base URL.

    Unset, `http` is uvicorn's own protocol.
    """
    failures: list[BaseException] = []

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        # uvicorn only logs what the start-up raises; it is kept here for the caller.
        try:
            await app(scope, receive, send)
        except BaseException as error:
            if scope["type"] == "lifespan":
                failures.append(error)
            raise

    # Bound here, so that the port is known and connections wait from the first moment on.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(_configured(guarded, http))
        thread = threading.Thread(
            target=_run, args=(server, listener, failures), name="kiln-embedded", daemon=True
        )
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.02)
            if not server.started:
                raise failures[0] if failures else ModelLoadError("the embedded server did not start")
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(STOP_WITHIN_S)


def _configured(app: ASGIApp, http: type[asyncio.Protocol] | None) -> uvicorn.Config:
    # The chat owns the terminal, so nothing is logged, and its signals stay its own.
    return uvicorn.Config(
        app,
        lifespan="on",
        log_config=None,
        log_level="critical",
        access_log=False,
        http=http or "auto",
        ws="none",
        timeout_graceful_shutdown=1,
    )


def _run(server: uvicorn.Server, listener: socket.socket, failures: list[BaseException]) -> None:
    try:
        server.run(sockets=[listener])
    except SystemExit:
        pass  # uvicorn's way to say that the start-up failed; the reason is known by now
    except BaseException as error:
        failures.append(error)
