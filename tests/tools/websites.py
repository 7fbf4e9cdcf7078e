"""A small web server on loopback whose pages are what a test says."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Site:
    """`pages` maps paths to bodies' writers; `requests` has the head of every request."""

    port: int
    pages: dict[str, Answer] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def page(self, path: str, body: bytes, kind: str | None = "text/html", **headers: str) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if kind is not None:
            named["content-type"] = kind
        self.pages[path] = answer("200 OK", named, body)

    def redirect(self, path: str, location: str, status: str = "302 Found") -> None:
        self.pages[path] = answer(status, {"location": location}, b"moved")

    def trickle(self, path: str) -> None:
        """A page that never ends, a byte at a time."""

        async def write(writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n")
            try:
                while True:
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.01)
            finally:
                self.gone.set()

        self.pages[path] = write


def answer(status: str, headers: dict[str, str], body: bytes) -> Answer:
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers.items())]
    head = "\r\n".join([*lines, f"content-length: {len(body)}", "connection: close", "", ""])

    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(head.encode() + body)
        await writer.drain()

    return write


@asynccontextmanager
async def website(tls: ssl.SSLContext | None = None) -> AsyncIterator[Site]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            site.requests.append(head)
            path = head.split(" ")[1]
            await site.pages.get(path, answer("404 Not Found", {}, b"no"))(writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    site = Site(server.sockets[0].getsockname()[1])
    async with server:
        yield site
