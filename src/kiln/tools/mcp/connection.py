"""One connection to a server of the Model Context Protocol, from its start to the end of its process.

The client library's scopes must be left by the task that entered them, so a connection has a task of its own
that holds it open. Everybody else only waits for it or asks it to end.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import httpx2
import mcp_types as types
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from kiln import __version__
from kiln.core.settings import McpServerSettings
from kiln.tools.mcp.program import run_program

logger = logging.getLogger(__name__)
# The library logs a traceback for every line of garbage; what matters of it is said here.
logging.getLogger("mcp").setLevel(logging.CRITICAL)

OURSELVES = types.Implementation(name="kiln", version=__version__)
MOST_PAGES = 20
# A program is ended within about six seconds, whatever it does.
END_SECONDS = 15.0


class CannotConnect(Exception):
    """The server was not reached. The message says why."""


class Connection:
    """`is_open` turns false when the server is gone. `is_doubtful` says that a call was given up on, so that
    whether the server still answers is not known."""

    def __init__(self, name: str, settings: McpServerSettings) -> None:
        """Begins to connect at once. Needs a running event loop."""
        self.is_doubtful = False
        self.tools_changed = False
        self._name = name
        self._settings = settings
        self._ready: asyncio.Future[Client | CannotConnect] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._has_ended = False
        self._checking: asyncio.Task[bool] | None = None
        self._task = asyncio.create_task(self._hold(), name=f"kiln-mcp-{name}")

    @property
    def is_open(self) -> bool:
        return not (self._has_ended or self._stop.is_set() or self._task.done())

    @property
    def _too_slow(self) -> str:
        return f"it did not answer within {self._settings.timeout_s:g} seconds"

    async def client(self) -> Client:
        """The client, once it is connected. Raises CannotConnect within the settings' timeout."""
        try:
            # Ending a program that was too slow takes time that nobody waits for.
            async with asyncio.timeout(self._settings.timeout_s + 0.2):
                client = await asyncio.shield(self._ready)
        except TimeoutError:
            raise CannotConnect(self._too_slow) from None
        if isinstance(client, CannotConnect):
            raise client
        return client

    async def answers(self) -> bool:
        """Whether the server still answers, found out once for all who ask at the same time."""
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check())
        return await asyncio.shield(self._checking)

    async def list_tools(self) -> list[types.Tool]:
        """All tools of the server. Raises what the library raises, and TimeoutError."""
        client = await self.client()
        found: list[types.Tool] = []
        cursor: str | None = None
        async with asyncio.timeout(self._settings.timeout_s):
            for _ in range(MOST_PAGES):
                page = await client.list_tools(cursor=cursor)
                found += page.tools
                cursor = page.next_cursor
                if cursor is None:
                    break
        return found

    def end(self) -> None:
        """Begin to end it; `ended` waits for that."""
        self._stop.set()

    async def ended(self) -> None:
        """Wait until the connection and the process behind it are gone."""
        done, _ = await asyncio.wait([self._task], timeout=END_SECONDS)
        if not done:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _check(self) -> bool:
        try:
            await self.list_tools()
        except Exception:
            return False
        self.is_doubtful = False
        return True

    async def _hold(self) -> None:
        failure = "it was ended before it had started"
        try:
            with anyio.fail_after(self._settings.timeout_s) as start:
                # A cache of the library's own would hide that a server is gone.
                async with Client(
                    self._transport(), client_info=OURSELVES, cache=None, message_handler=self._hear
                ) as client:
                    start.deadline = math.inf
                    self._ready.set_result(client)
                    await self._stop.wait()
        except TimeoutError:
            failure = self._too_slow
        except Exception as error:
            failure = reason_of(error)
            logger.info("the connection to the tool server %s ended: %s", self._name, failure)
        finally:
            self._has_ended = True
            if not self._ready.done():
                self._ready.set_result(CannotConnect(failure))

    def _transport(self) -> AbstractAsyncContextManager[Any]:
        if self._settings.command is not None:
            return run_program(self._settings, self._note_end)
        return _reach(self._settings)

    async def _hear(self, message: Any) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            self.tools_changed = True

    def _note_end(self) -> None:
        self._has_ended = True
        # Not left to the next call: a process that has ended is collected now.
        self._stop.set()


@asynccontextmanager
async def _reach(settings: McpServerSettings) -> AsyncIterator[Any]:
    """The transport to a server at an address."""
    assert settings.url is not None
    # Calls may take long; the toolbox bounds them.
    timeout = httpx2.Timeout(settings.timeout_s, read=None)
    async with httpx2.AsyncClient(headers=dict(settings.headers or {}), timeout=timeout) as client:
        async with streamable_http_client(settings.url, http_client=client) as streams:
            yield streams


def reason_of(error: BaseException) -> str:
    """Why a server was not reached or did not answer, in words for the model and the log."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, FileNotFoundError):
        return "its program is not there"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    if isinstance(error, MCPError):
        return error.message
    return str(error)[:300] or type(error).__name__
