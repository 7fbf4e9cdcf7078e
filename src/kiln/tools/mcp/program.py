"""The transport to an MCP server that is a program: one JSON message a line on its standard streams.

The client library has one too. It reads lines of any length and any number of lines that are no messages,
so a program that prints nonsense would cost the server memory and time; here both have an end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from kiln.core.settings import McpServerSettings

logger = logging.getLogger(__name__)

LINE_BYTES = 16_777_216
# Programs print a banner or a log line where a message should be; more than this is no such slip.
MOST_STRAY_LINES = 100
# Seconds to end by itself once its input is closed, then once it is asked to, then to vanish.
GRACE_S = 2.0

Incoming = MemoryObjectSendStream[SessionMessage | Exception]
Outgoing = MemoryObjectReceiveStream[SessionMessage]


@asynccontextmanager
async def run_program(settings: McpServerSettings, ended: Callable[[], None]) -> AsyncIterator[Any]:
    """Start the program and give the streams of messages from it and to it.

    `ended` is called when it says no more. Leaving ends the program and its children, whatever they do,
    in at most three times GRACE_S.
    """
    assert settings.command is not None
    process = await asyncio.create_subprocess_exec(
        settings.command,
        *settings.args,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=get_default_environment() | dict(settings.env or {}),
        cwd=settings.cwd,
        limit=LINE_BYTES,
        # Its children can be ended with it, and a Ctrl-C at kiln's terminal is kiln's to answer.
        start_new_session=True,
    )
    into_session, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, from_session = anyio.create_memory_object_stream[SessionMessage](0)

    async def read() -> None:
        async with into_session:
            await _read_messages(process, into_session)
        ended()

    try:
        async with anyio.create_task_group() as pumps, incoming, outgoing:
            pumps.start_soon(read)
            pumps.start_soon(_write_messages, process, from_session)
            yield incoming, outgoing
            pumps.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)


async def _read_messages(process: asyncio.subprocess.Process, into: Incoming) -> None:
    assert process.stdout is not None
    stray = 0
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        while stray <= MOST_STRAY_LINES:
            try:
                line = await process.stdout.readline()
            except ValueError:
                logger.warning("a tool server wrote a line of more than %d bytes", LINE_BYTES)
                return
            if not line:
                return
            try:
                message = jsonrpc_message_adapter.validate_json(line, by_name=False)
            except ValueError:
                stray += 1
                continue
            await into.send(SessionMessage(message))
        logger.warning("a tool server wrote %d lines that are no messages", stray)


async def _write_messages(process: asyncio.subprocess.Process, messages: Outgoing) -> None:
    assert process.stdin is not None
    # A program that is gone is noticed where its output ends.
    with suppress(OSError):
        async with messages:
            async for message in messages:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(text.encode() + b"\n")
                await process.stdin.drain()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Close its input, then ask it to end, then kill it and what it started."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    gone = asyncio.ensure_future(_drain_and_wait(process))
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            _signal(process, number)
        await asyncio.wait([gone], timeout=GRACE_S)
        if gone.done():
            break
    # Children that outlive it are killed too; without it, nobody speaks to them.
    _signal(process, signal.SIGKILL)
    if not gone.done():
        gone.cancel()
        logger.warning("the process %d of a tool server cannot be killed", process.pid)


async def _drain_and_wait(process: asyncio.subprocess.Process) -> None:
    # Waiting for a process also waits for the end of its output.
    assert process.stdout is not None
    while await process.stdout.read(65536):
        pass
    await process.wait()


def _signal(process: asyncio.subprocess.Process, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
