"""The tools of one configured server of the Model Context Protocol, as `server__tool`.

Nothing is started or reached before a tool is asked for. A server that cannot be reached, hangs, dies or
answers nonsense gives errors in bounded time, and is connected to anew at the next use.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Any

import mcp_types as types
from mcp.shared.exceptions import MCPError

from kiln.core.settings import McpServerSettings
from kiln.tools.mcp.connection import CannotConnect, Connection, reason_of
from kiln.tools.tool import Category, ServerTool, ToolResult

logger = logging.getLogger(__name__)

SEPARATOR = "__"
DESCRIPTION_CHARS = 2000
# What the names of functions may be in the dialects that kiln speaks.
_FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class McpServer:
    """Connects when it is asked for a tool, and again when the last connection is gone."""

    category: Category = "mcp"

    def __init__(self, name: str, settings: McpServerSettings) -> None:
        self.name = name
        self._settings = settings
        self._connection: Connection | None = None
        self._tools: dict[str, McpTool] = {}
        # Connections that were given up and are still being ended.
        self._ending: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def owns(self, tool: str) -> bool:
        return tool.startswith(self.name + SEPARATOR)

    async def find(self, tool: str) -> ServerTool | ToolResult | None:
        connection: Connection | None = None
        try:
            connection = await self._connected()
            known = self._tools.get(tool)
            if known is None or known.connection is not connection or connection.tools_changed:
                await self._list(connection)
            return self._tools.get(tool)
        except CannotConnect as error:
            reason = str(error)
        except TimeoutError:
            reason = f"it did not list its tools within {self._settings.timeout_s:g} seconds"
        except Exception as error:
            reason = reason_of(error)
        if connection is not None:
            self._give_up(connection)
        return ToolResult.failed(f"The tool server {self.name} cannot be used: {reason}.")

    async def aclose(self) -> None:
        """End the server and wait until its process is gone."""
        self._is_closed = True
        if self._connection is not None:
            self._give_up(self._connection)
        while self._ending:
            await asyncio.wait(self._ending)

    async def _connected(self) -> Connection:
        if self._is_closed:
            raise CannotConnect("kiln is shutting down")
        connection = self._connection
        if connection is not None and connection.is_open and connection.is_doubtful:
            if not await connection.answers():
                self._give_up(connection)
        # No await between the look and the making: two who ask at once share one connection.
        if self._connection is not None and not self._connection.is_open:
            self._give_up(self._connection)
        if self._connection is None:
            self._connection = Connection(self.name, self._settings)
        connection = self._connection
        await connection.client()
        return connection

    async def _list(self, connection: Connection) -> None:
        connection.tools_changed = False
        tools: dict[str, McpTool] = {}
        for tool in await connection.list_tools():
            name = self.name + SEPARATOR + re.sub(r"[./ ]", "_", tool.name)
            if not _FUNCTION_NAME.fullmatch(name):
                logger.warning("the tool %r of the tool server %s has no usable name", tool.name, self.name)
            else:
                tools.setdefault(name, McpTool(name, tool, connection))
        self._tools = tools

    def _give_up(self, connection: Connection) -> None:
        connection.end()
        if self._connection is connection:
            self._connection = None
            task = asyncio.create_task(connection.ended())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)


class McpTool:
    """One tool of a server, over the connection that listed it."""

    category: Category = "mcp"

    def __init__(self, name: str, tool: types.Tool, connection: Connection) -> None:
        self.name = name
        self.description = (tool.description or tool.title or tool.name)[:DESCRIPTION_CHARS]
        self.parameters: dict[str, Any] = tool.input_schema
        self.connection = connection
        self._remote_name = tool.name

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        try:
            client = await self.connection.client()
            return _result_of(await client.call_tool(self._remote_name, arguments))
        except asyncio.CancelledError:
            # Nobody knows whether the server hung or the caller went away; the next use finds out.
            self.connection.is_doubtful = True
            raise
        except MCPError as error:
            gone = "" if self.connection.is_open else " (the tool server has ended)"
            return ToolResult.failed(f"{self.name} failed: {error.message}{gone}.")
        except Exception as error:
            self.connection.is_doubtful = True
            logger.info("the tool %s failed", self.name, exc_info=True)
            return ToolResult.failed(f"{self.name} gave no usable result: {reason_of(error)}.")


def _result_of(result: types.CallToolResult) -> ToolResult:
    parts = [_show(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return ToolResult("\n".join(parts) or "(no output)", is_error=result.is_error)


def _show(block: types.ContentBlock) -> str:
    if isinstance(block, types.TextContent):
        return block.text
    if isinstance(block, types.ResourceLink):
        return f"{block.name}: {block.uri}"
    if isinstance(block, types.EmbeddedResource):
        inner = block.resource
        return inner.text if isinstance(inner, types.TextResourceContents) else f"[{inner.uri}, not shown]"
    return f"[{block.mime_type}, not shown]"
