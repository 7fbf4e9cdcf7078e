"""A well-behaved MCP server, made with the official library. Run as a program it speaks stdio."""

from __future__ import annotations

import asyncio
import os

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("good")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ToolError("out of clay")


@server.tool()
def pid() -> str:
    """The process of this server."""
    return str(os.getpid())


@server.tool()
def secret() -> str:
    """What is in the environment."""
    return os.environ.get("TOKEN", "none") + " " + os.environ.get("NOT_PASSED", "none")


@server.tool()
async def sleep(seconds: float) -> str:
    """Sleep, then say so."""
    await asyncio.sleep(seconds)
    return "awake"


if __name__ == "__main__":
    server.run("stdio")
