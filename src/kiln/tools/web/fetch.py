"""`fetch_page`: a page of the public web as text."""

from __future__ import annotations

import asyncio
import json
import ssl
import zlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import httpcore
import httpx
import msgspec
from msgspec import Meta

from kiln import __version__
from kiln.confine.run import Bounds, ConfinedError, run_confined
from kiln.tools.tool import Arguments, Category, Source, ToolResult
from kiln.tools.web.addresses import Forbidden, GuardedNetwork, tls_context

URL_CHARS = 2048
CHILDREN = 4
REDIRECTS = (301, 302, 303, 307, 308)
HTML = ("text/html", "application/xhtml+xml")
TEXT = ("application/json", "application/xml", "application/yaml", "application/javascript")
HEADERS = [
    ("user-agent", f"kiln/{__version__} (fetch_page)"),
    ("accept", "text/html, application/xhtml+xml, text/plain;q=0.9, */*;q=0.5"),
    ("accept-encoding", "gzip, deflate"),
]
Opened = AbstractAsyncContextManager[httpcore.Response]
CONNECTION_ERRORS = (
    httpcore.NetworkError,
    httpcore.TimeoutException,
    httpcore.ProtocolError,
    httpcore.UnsupportedProtocol,
)


class CannotFetch(Exception):
    """The page cannot be had; the message says why."""


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """`max_bytes` counts a page unpacked; `timeout_s` and `max_memory_bytes` bound the reading of HTML."""

    max_bytes: int = 2_097_152
    max_redirects: int = 5
    timeout_s: float = 30.0
    max_memory_bytes: int = 1_073_741_824


@dataclass(frozen=True, slots=True)
class Page:
    """A page as it came: where from in the end, what it is, and its bytes, unpacked."""

    url: str
    content_type: str
    charset: str | None
    content: bytes


class Fetcher:
    """Gets pages. Every connection, also of a redirect, goes through the guard of `network`."""

    def __init__(
        self,
        limits: FetchLimits,
        network: GuardedNetwork | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._limits = limits
        self._network = network or GuardedNetwork()
        self._tls = tls

    async def fetch(self, address: str) -> Page:
        """The page, redirects followed. Raises CannotFetch."""
        url = _checked(address)
        tls = self._tls or await asyncio.to_thread(tls_context)
        async with httpcore.AsyncConnectionPool(tls, network_backend=self._network) as pool:
            for _ in range(self._limits.max_redirects + 1):
                async with _get(pool, url) as response:
                    headers = httpx.Headers(response.headers)
                    if response.status not in REDIRECTS or "location" not in headers:
                        return await self._page(url, response, headers)
                    url = _next(url, headers["location"])
        raise CannotFetch(f"it redirects more than {self._limits.max_redirects} times")

    async def _page(self, url: httpx.URL, response: httpcore.Response, headers: httpx.Headers) -> Page:
        if response.status != 200:
            raise CannotFetch(f"{url.host} answers with status {response.status}")
        kind, charset = _content_type(headers)
        if not (kind in HTML or kind.startswith("text/") or kind in TEXT or kind.endswith(("+json", "+xml"))):
            raise CannotFetch(f"it is of the type {kind or '(none given)'}, which is not text")
        content = await self._body(response, headers.get("content-encoding", "").strip().lower())
        return Page(str(url), kind, charset, content)

    async def _body(self, response: httpcore.Response, encoding: str) -> bytes:
        unpack = _Unpacker(encoding, self._limits.max_bytes)
        async for part in response.aiter_stream():
            unpack.feed(part)
        return bytes(unpack.content)


class _Unpacker:
    """Collects a body and unpacks it, never beyond the limit: a small body may unpack to a huge one."""

    def __init__(self, encoding: str, most: int) -> None:
        if encoding not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise CannotFetch(f"it is packed as {encoding[:32]}, which was not asked for")
        # 47 makes zlib tell gzip from deflate by the header.
        self._zlib = zlib.decompressobj(47) if encoding not in ("", "identity") else None
        self._most = most
        self.content = bytearray()

    def feed(self, part: bytes) -> None:
        room = self._most + 1 - len(self.content)
        try:
            self.content += part[:room] if self._zlib is None else self._zlib.decompress(part, room)
        except zlib.error:
            raise CannotFetch("its packing is broken") from None
        if len(self.content) > self._most:
            raise CannotFetch(f"it has more than {self._most} bytes")


def _get(pool: httpcore.AsyncConnectionPool, url: httpx.URL) -> Opened:
    target = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
    return _explained(pool.stream("GET", target, headers=HEADERS), url)


@asynccontextmanager
async def _explained(opened: Opened, url: httpx.URL) -> AsyncIterator[httpcore.Response]:
    try:
        async with opened as response:
            yield response
    except Forbidden as error:
        raise CannotFetch(str(error)) from None
    except CONNECTION_ERRORS as error:
        raise CannotFetch(f"{url.host} cannot be read: {error or type(error).__name__}") from None


def _checked(address: str) -> httpx.URL:
    try:
        url = httpx.URL(address)
    except (httpx.InvalidURL, ValueError):
        raise CannotFetch(f"{address[:200]!r} is not a URL") from None
    if url.scheme not in ("http", "https"):
        raise CannotFetch("only http and https URLs are fetched")
    if url.port is not None and not 0 < url.port < 65536:
        raise CannotFetch(f"there is no port {url.port}")
    if not url.host:
        raise CannotFetch("the URL names no host")
    if url.userinfo:
        raise CannotFetch("URLs with a user name or a password are not fetched")
    return url


def _next(url: httpx.URL, location: str) -> httpx.URL:
    try:
        return _checked(str(url.join(location)))
    except httpx.InvalidURL:
        raise CannotFetch("it redirects to something that is not a URL") from None


def _content_type(headers: httpx.Headers) -> tuple[str, str | None]:
    kind, *parameters = headers.get("content-type", "").split(";")
    pairs = (parameter.strip().lower().partition("=") for parameter in parameters)
    charset = next((value.strip("\"' ") for name, _, value in pairs if name == "charset"), None)
    return kind.strip().lower(), charset


class FetchPageArguments(msgspec.Struct, forbid_unknown_fields=True):
    url: Annotated[str, Meta(description="The http or https URL of the page.", max_length=URL_CHARS)]


class FetchPage:
    name = "fetch_page"
    category: Category = "network"
    description = "Read a page of the public web as text."
    _arguments = Arguments(FetchPageArguments)
    parameters = _arguments.schema

    def __init__(
        self,
        limits: FetchLimits,
        network: GuardedNetwork | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._limits = limits
        self._fetcher = Fetcher(limits, network, tls)
        # Each child that reads HTML takes some hundred megabytes.
        self._children = asyncio.Semaphore(CHILDREN)

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        given = self._arguments.read(arguments)
        if isinstance(given, ToolResult):
            return given
        try:
            page = await self._fetcher.fetch(given.url)
            title, text = await self._read(page)
        except (CannotFetch, ConfinedError) as error:
            return ToolResult.failed(f"The page cannot be read: {error}.")
        heading = f"{title}\n{page.url}\n\n" if title else f"{page.url}\n\n"
        return ToolResult(heading + text, (Source(title or page.url, page.url, text[:200]),))

    async def _read(self, page: Page) -> tuple[str, str]:
        """Title and text."""
        limits = self._limits
        head = json.dumps({"charset": page.charset, "is_html": page.content_type in HTML})
        bounds = Bounds(limits.timeout_s, limits.max_memory_bytes, 8 * limits.max_bytes + 65_536)
        payload = head.encode() + b"\n" + page.content
        async with self._children:
            output = await run_confined("kiln.tools.web.readable:extract", payload, bounds)
        answer = await asyncio.to_thread(json.loads, output)
        return answer["title"], answer["text"]
