"""Serves the application with uvicorn until a signal, and drains it in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette

from kiln.cli.assembly import create_app
from kiln.core.errors import ConfigError, ModelLoadError, SetupError
from kiln.core.settings import Settings
from kiln.http.connection import protocol_within
from kiln.http.state import ServerState

log = logging.getLogger(__name__)

# Files that a server has open besides its connections: the model, the store, pipes, connections of tools.
_OTHER_FILES = 256


OnReady = Callable[[str, bool], None]


def serve(settings: Settings, on_ready: OnReady | None = None) -> None:
    """Serve until SIGINT or SIGTERM; running requests get `server.shutdown_grace_s` to finish.

    `on_ready` hears the base URL, and whether the model can think, once requests are answered.
    Raises SetupError.
    """
    logging.basicConfig(
        level=settings.server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if settings.server.log_level == "info":
        logging.getLogger("kiln.llamacpp").setLevel(logging.WARNING)
    app = create_app(settings)
    _allow_open_files(settings.server.max_connections)
    listener = _listen(settings.server.host, settings.server.port)
    config = uvicorn.Config(
        app,
        log_config=None,
        # At info kiln says itself what an operator wants to know.
        log_level="warning" if settings.server.log_level == "info" else settings.server.log_level,
        access_log=False,
        lifespan="on",
        # The drain cuts running requests at the grace limit; this is the second line behind it.
        timeout_graceful_shutdown=int(settings.server.shutdown_grace_s) + 5,
        http=protocol_within(settings.server, app),
        ws="none",
    )
    with listener:
        host, port = listener.getsockname()[:2]
        server = _Server(config, app, on_ready, f"http://{_url_host(host)}:{port}")
        # A failure that kiln explains itself needs no traceback of uvicorn's.
        logging.getLogger("uvicorn.error").addFilter(lambda _: not hasattr(app.state, "failure"))
        with contextlib.suppress(SystemExit):
            server.run(sockets=[listener])
    if not server.started:
        failure: SetupError | None = getattr(app.state, "failure", None)
        raise failure or ModelLoadError("the server could not start; its log says why")


class _Server(uvicorn.Server):
    """uvicorn that says when it is ready, and drains the chat service while connections close."""

    def __init__(
        self,
        config: uvicorn.Config,
        app: Starlette,
        on_ready: OnReady | None,
        url: str,
    ) -> None:
        super().__init__(config)
        self._app = app
        self._on_ready = on_ready
        self._url = url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started and self._on_ready is not None:
            state: ServerState = self._app.state.kiln
            self._on_ready(self._url, state.service.model.can_think)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state: ServerState = self._app.state.kiln
        drain = asyncio.ensure_future(state.drain())
        await super().shutdown(sockets=sockets)
        await drain

    def handle_exit(self, sig: int, frame: Any) -> None:
        if not self.started:
            # Nothing runs yet that could be ended in order: the load is broken off.
            raise KeyboardInterrupt
        if self.should_exit:
            # A second signal cuts what still runs, with the error event that the end of the grace gives.
            self._app.state.kiln.catalog.hurry()
        self.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {os.strerror(error.errno) if error.errno else error}",
            hint="Choose another address with --host and --port.",
        ) from None


def _allow_open_files(connections: int) -> None:
    """Raise the process's limit of open files so that these connections fit, as far as the system allows."""
    try:
        import resource
    except ImportError:
        return  # Windows has no such limit
    wanted = connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        log.warning(
            "the system allows %d open files, too few for server.max_connections = %d; raise `ulimit -n`",
            soft,
            connections,
        )


def _url_host(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "localhost"
    return f"[{host}]" if ":" in host else host
