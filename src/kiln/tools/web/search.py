"""`web_search`: over a SearXNG instance, or with the ddgs library."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Protocol

import httpx
import msgspec
from msgspec import Meta

from kiln.confine.run import Bounds, ConfinedError, run_confined
from kiln.tools.tool import Arguments, Category, Source, ToolResult
from kiln.tools.web.addresses import tls_context

QUERY_CHARS = 400
ANSWER_BYTES = 4_194_304


class SearchFailed(Exception):
    """The search service gave no answer; the message says why."""


class SearchProvider(Protocol):
    async def search(self, query: str, count: int) -> list[Source]:
        """The best results, at most `count`. Raises SearchFailed."""
        ...


class SearXNG:
    """The JSON interface of a SearXNG instance, which its `search.formats` setting must allow."""

    def __init__(self, base_url: str, *, timeout_s: float) -> None:
        self._url = base_url.rstrip("/") + "/search"
        self._timeout_s = timeout_s

    async def search(self, query: str, count: int) -> list[Source]:
        try:
            tls = await asyncio.to_thread(tls_context)
            async with httpx.AsyncClient(timeout=self._timeout_s, verify=tls) as client:
                parameters = {"q": query, "format": "json"}
                async with client.stream("GET", self._url, params=parameters) as response:
                    if response.status_code != 200:
                        raise SearchFailed(_status(response.status_code))
                    content = await _bounded(response)
        except httpx.HTTPError as error:
            raise SearchFailed(f"the search service cannot be reached: {type(error).__name__}") from None
        return await asyncio.to_thread(_sources_of, content, count)


class Ddgs:
    """The ddgs library, in a process of its own: its threads cannot be stopped otherwise."""

    def __init__(self, *, timeout_s: float) -> None:
        self._bounds = Bounds(timeout_s, memory_bytes=2**32, output_bytes=ANSWER_BYTES)

    async def search(self, query: str, count: int) -> list[Source]:
        payload = json.dumps({"query": query, "count": count}).encode()
        try:
            output = await run_confined("kiln.tools.web.search:ask_ddgs", payload, self._bounds)
        except ConfinedError as error:
            raise SearchFailed(f"the search came to no result: {error}") from None
        answer = json.loads(output)
        if "error" in answer:
            raise SearchFailed(answer["error"])
        return _sources(answer["results"], count)


def ask_ddgs(payload: bytes) -> bytes:
    """From JSON `{"query", "count"}`, JSON `{"results": [{"title", "url", "content"}]}` or `{"error"}`."""
    from ddgs import DDGS
    from ddgs.exceptions import DDGSException

    asked = json.loads(payload)
    try:
        found = DDGS().text(asked["query"], max_results=asked["count"])
    except DDGSException as error:
        # The library calls it an error when there are none.
        if "no results" in str(error).lower():
            return json.dumps({"results": []}).encode()
        return json.dumps({"error": f"the search service cannot be reached: {error}"[:300]}).encode()
    results = [{"title": r.get("title"), "url": r.get("href"), "content": r.get("body")} for r in found]
    return json.dumps({"results": results}).encode()


async def _bounded(response: httpx.Response) -> bytes:
    content = bytearray()
    async for part in response.aiter_bytes():
        content += part
        if len(content) > ANSWER_BYTES:
            raise SearchFailed(f"the search service answers with more than {ANSWER_BYTES} bytes")
    return bytes(content)


def _status(status: int) -> str:
    remedy = "; its administrator must allow the format json" if status == 403 else ""
    return f"the search service answers with status {status}{remedy}"


def _sources_of(content: bytes, count: int) -> list[Source]:
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        raise SearchFailed("the search service does not answer with JSON") from None
    results = answer.get("results") if isinstance(answer, dict) else None
    if not isinstance(results, list):
        raise SearchFailed("the search service's answer has no list of results")
    return _sources(results, count)


def _sources(results: Iterable[object], count: int) -> list[Source]:
    """The well-formed among the results, each address once."""
    found: dict[str, Source] = {}
    for result in results:
        if not isinstance(result, Mapping):
            continue
        url, title, snippet = (result.get(key) for key in ("url", "title", "content"))
        if isinstance(url, str) and url.startswith(("http://", "https://")) and isinstance(title, str):
            found.setdefault(url, Source(title, url, snippet if isinstance(snippet, str) else ""))
    return list(found.values())[:count]


class WebSearchArguments(msgspec.Struct, forbid_unknown_fields=True):
    query: Annotated[
        str, Meta(description="What to look for, in a few words.", min_length=1, max_length=QUERY_CHARS)
    ]


class WebSearch:
    name = "web_search"
    category: Category = "network"
    description = "Search the web. Gives titles, addresses and excerpts of the best results."
    _arguments = Arguments(WebSearchArguments)
    parameters = _arguments.schema

    def __init__(self, provider: SearchProvider, count: int) -> None:
        self._provider = provider
        self._count = count

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        given = self._arguments.read(arguments)
        if isinstance(given, ToolResult):
            return given
        if not given.query.strip():
            return ToolResult.failed("The query is empty.")
        try:
            sources = await self._provider.search(given.query.strip(), self._count)
        except SearchFailed as error:
            return ToolResult.failed(f"No search was made: {error}.")
        if not sources:
            return ToolResult("Nothing was found. Try other words.")
        lines = (f"{i}. {s.title}\n{s.url}\n{s.snippet}".rstrip() for i, s in enumerate(sources, 1))
        return ToolResult("\n\n".join(lines), tuple(sources))
