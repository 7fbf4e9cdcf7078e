"""web_search over a SearXNG that the tests serve, and ddgs as far as it goes without a network."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import ddgs
import pytest
from ddgs.exceptions import DDGSException

from kiln.core.settings import Settings, ToolsSettings
from kiln.tools.build import toolbox_from
from kiln.tools.tool import Source, ToolResult
from kiln.tools.web.search import Ddgs, SearXNG, WebSearch, ask_ddgs

from .websites import Site, answer, website

RESULTS: list[Any] = [
    {"title": "Kilns", "url": "https://a.example/kilns", "content": "About kilns."},
    {"title": "Again", "url": "https://a.example/kilns", "content": "The same page."},
    {"title": "No address"},
    "nonsense",
    {"title": "Script", "url": "javascript:alert(1)", "content": "x"},
    {"title": "Ovens", "url": "http://b.example/", "content": None},
    {"title": "More", "url": "http://c.example/", "content": "More."},
]
PATH = "/sub/search?q=kiln+%26+clay&format=json"


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with website() as running:
        yield running


async def search(site: Site, query: str = "kiln & clay", count: int = 2) -> ToolResult:
    provider = SearXNG(f"http://127.0.0.1:{site.port}/sub/", timeout_s=10)
    return await WebSearch(provider, count).run({"query": query})


async def test_results_are_sources(site: Site) -> None:
    site.page(PATH, json.dumps({"results": RESULTS}).encode(), "application/json")
    result = await search(site)
    assert not result.is_error
    assert result.sources == (
        Source("Kilns", "https://a.example/kilns", "About kilns."),
        Source("Ovens", "http://b.example/", ""),
    )
    assert result.text == ("1. Kilns\nhttps://a.example/kilns\nAbout kilns.\n\n2. Ovens\nhttp://b.example/")
    assert result.sources[0].to_dict() == {
        "title": "Kilns",
        "url": "https://a.example/kilns",
        "snippet": "About kilns.",
    }


async def test_nothing_found_is_no_error(site: Site) -> None:
    site.page(PATH, b'{"results": []}', "application/json")
    result = await search(site)
    assert (result.is_error, result.sources) == (False, ())
    assert "Nothing was found" in result.text


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"<html>", "does not answer with JSON"),
        (b"[" * 100_000, "does not answer with JSON"),
        (b"[]", "no list of results"),
        (b'{"results": 5}', "no list of results"),
        (b'{"results": "' + b"x" * 4_194_304 + b'"}', "more than 4194304 bytes"),
    ],
)
async def test_answers_that_make_no_sense_are_errors(site: Site, body: bytes, reason: str) -> None:
    site.page(PATH, body, "application/json")
    result = await search(site)
    assert result.is_error
    assert reason in result.text


async def test_a_service_that_refuses_or_is_not_there_is_an_error(site: Site) -> None:
    site.pages[PATH] = answer("403 Forbidden", {}, b"")
    assert "must allow the format json" in (await search(site)).text
    site.pages[PATH] = answer("302 Found", {"location": "http://127.0.0.1/"}, b"")
    assert "status 302" in (await search(site)).text
    async with website() as gone:
        pass
    result = await search(gone)
    assert result.is_error
    assert "cannot be reached: ConnectError" in result.text


@pytest.mark.parametrize("query", ["", " ", "x" * 401, 5])
async def test_the_query_is_checked(site: Site, query: Any) -> None:
    assert (await search(site, query)).is_error
    assert site.requests == []


async def test_it_is_off_unless_configured_and_allowed(site: Site) -> None:
    outcome = await toolbox_from(Settings(tools=ToolsSettings(allow=("*",)))).run(
        "web_search", {"query": "x"}
    )
    assert outcome.status == "denied"
    assert "tools.search_provider is unset" in outcome.text
    url = f"http://127.0.0.1:{site.port}/sub"
    found = ToolsSettings(search_provider="searxng", searxng_url=url)
    assert not toolbox_from(Settings(tools=found)).is_allowed("web_search")
    allowed = ToolsSettings(allow=("web_*",), search_provider="searxng", searxng_url=url)
    site.page(PATH, json.dumps({"results": RESULTS}).encode(), "application/json")
    outcome = await toolbox_from(Settings(tools=allowed)).run("web_search", {"query": "kiln & clay"})
    assert (outcome.status, len(outcome.sources)) == ("done", 3)


async def test_ddgs_without_a_network_is_an_error_in_bounded_time() -> None:
    result = await WebSearch(Ddgs(timeout_s=20), 3).run({"query": "kiln"})
    assert result.is_error
    assert "No search was made" in result.text


def test_what_ddgs_finds_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    class Found:
        def text(self, query: str, max_results: int) -> list[dict[str, str]]:
            asked.append((query, max_results))
            return [{"title": "Kilns", "href": "https://a.example/", "body": "About kilns."}]

    monkeypatch.setattr(ddgs, "DDGS", Found)
    answer = json.loads(ask_ddgs(b'{"query": "kiln", "count": 3}'))
    assert answer == {"results": [{"title": "Kilns", "url": "https://a.example/", "content": "About kilns."}]}
    assert asked == [("kiln", 3)]

    class Nothing:
        def text(self, query: str, max_results: int) -> list[dict[str, str]]:
            raise DDGSException("No results found.")

    monkeypatch.setattr(ddgs, "DDGS", Nothing)
    assert json.loads(ask_ddgs(b'{"query": "kiln", "count": 3}')) == {"results": []}
