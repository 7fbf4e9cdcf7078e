"""Requests by hand on plain sockets, where a test decides what is sent and read, and when."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 60.0


@contextmanager
def connected(url: str, *, receive_buffer: int | None = None) -> Iterator[socket.socket]:
    """A connection to the server at `url`, closed at the end of the context. `receive_buffer` is in bytes."""
    address = urlsplit(url)
    with socket.socket() as connection:
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(TIMEOUT_S)
        connection.connect((address.hostname, address.port))
        yield connection


def post_bytes(url: str, path: str, body: Any, *headers: str) -> bytes:
    """A POST of a JSON value, as it is sent."""
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", f"host: {urlsplit(url).netloc}", "content-type: application/json"]
    return "\r\n".join([*lines, *headers, f"content-length: {len(content)}", "", ""]).encode() + content


@contextmanager
def posted(url: str, path: str, body: Any, *, receive_buffer: int | None = None) -> Iterator[socket.socket]:
    """A connection that has sent a request and read nothing yet."""
    with connected(url, receive_buffer=receive_buffer) as connection:
        connection.sendall(post_bytes(url, path, body))
        yield connection


async def answered(url: str, path: str, body: Any) -> bytes:
    """All that comes back for a POST on a connection of its own."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(post_bytes(url, path, body, "connection: close"))
    try:
        return await reader.read()
    finally:
        writer.close()
