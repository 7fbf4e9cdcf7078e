"""A server that shuts down lets exchanges of several rounds come to their end, within its grace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kiln.core.errors import ShuttingDown
from kiln.core.native import ToolUse
from kiln.dialects.lmkit import to_native
from kiln.http.state import ServerState
from kiln.native.context import open_skills
from kiln.native.exchange import NativeExchange
from kiln.tools.tool import ToolResult
from kiln.tools.toolbox import Toolbox
from kiln.wire.lmkit import NativeChatRequest, NativeMessage
from servers.scripted import Stage, scripted_app

from .test_rounds import call
from .tools import Add


class Gated(Add):
    """Runs until it is let go."""

    name = "gated"

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.cancelled = False

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return ToolResult("7")


@dataclass
class Running:
    """A server without its sockets, and the way to begin an exchange that uses the tool."""

    state: ServerState
    stage: Stage
    tool: Gated
    begin: Callable[[], NativeExchange]


@asynccontextmanager
async def in_a_tool() -> AsyncIterator[tuple[Running, NativeExchange]]:
    """An exchange whose tool runs."""
    app, stage = scripted_app()
    async with app.router.lifespan_context(app):
        tool = Gated()
        state: ServerState = replace(app.state.kiln, toolbox=Toolbox([tool]))

        def begin() -> NativeExchange:
            message = NativeMessage(role="user", content="hi")
            asked = NativeChatRequest(messages=[message], server_tools=["gated"])
            chat = to_native(asked, {})
            exchange = NativeExchange(
                chat, open_skills(chat, state.skills), state.means(), entered=0.0, on_end=lambda: None
            )
            exchange.start()
            return exchange

        stage.then("</think>", call("gated"))
        stage.then("</think>", "\n\n", "Seven.")
        exchange = begin()
        async for batch in exchange.events():
            if any(isinstance(event, ToolUse) for event in batch):
                break
        yield Running(state, stage, tool, begin), exchange
        exchange.abandon()


async def test_it_goes_on_after_the_tool() -> None:
    async with in_a_tool() as (server, exchange):
        drain = asyncio.ensure_future(server.state.catalog.drain(60))
        await asyncio.sleep(0.05)
        assert not drain.done()
        with pytest.raises(ShuttingDown):
            await server.begin().collect()
        server.tool.go.set()
        summary, _ = await exchange.collect()
        assert summary.alternatives[0].text == "Seven."
        await drain


async def test_it_is_cut_in_the_tool_when_the_grace_is_over() -> None:
    async with in_a_tool() as (server, exchange):
        await server.state.catalog.drain(0)
        with pytest.raises(ShuttingDown):
            await exchange.collect()
        assert server.tool.cancelled
