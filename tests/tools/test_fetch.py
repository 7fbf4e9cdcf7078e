"""fetch_page: what it reads, what it refuses to reach, and where it stops."""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kiln.core.settings import Settings, ToolsSettings
from kiln.tools.build import toolbox_from
from kiln.tools.policy import Policy
from kiln.tools.tool import ToolResult
from kiln.tools.toolbox import Toolbox
from kiln.tools.web.addresses import Forbidden, GuardedNetwork, Resolver, is_public
from kiln.tools.web.fetch import FetchLimits, FetchPage

from .certificates import certificate
from .websites import Site, answer, website

LOOPBACK = "127.0.0.1"


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with website() as running:
        yield running


async def fetch(url: str, site: Site | None = None, **limits: int) -> ToolResult:
    """Fetch with names under `test` leading to loopback, where the site's port alone is exempt."""

    async def resolve(host: str, port: int) -> list[str]:
        return [LOOPBACK] if host.endswith(".test") else await system(host, port)

    system = Resolver()
    exempt = [] if site is None else [(LOOPBACK, site.port)]
    tool = FetchPage(FetchLimits(**limits), GuardedNetwork(resolve, exempt))
    return await tool.run({"url": url})


ARTICLE = (
    "<html><head><title>Kilns</title><style>x{}</style></head><body><nav><a href='/'>Home</a></nav>"
    "<article><h1>Kilns</h1>"
    + "<p>A kiln is an oven in which clay becomes stone, slowly and with care.</p>" * 5
    + "</article><script>alert(1)</script></body></html>"
)


async def test_a_page_is_read_as_text(site: Site) -> None:
    site.page("/kilns?a=b", ARTICLE.encode(), "text/html; charset=utf-8")
    url = f"http://site.test:{site.port}/kilns?a=b"
    result = await fetch(url, site)
    assert not result.is_error
    assert result.text.startswith(f"Kilns\n{url}\n\n")
    assert "an oven in which clay becomes stone" in result.text
    for unwanted in ("alert", "<p>", "x{}"):
        assert unwanted not in result.text
    (source,) = result.sources
    assert (source.title, source.url) == ("Kilns", url)
    # The name stays the name, though the connection was made by number.
    assert f"host: site.test:{site.port}" in site.requests[0].lower()


async def test_short_and_odd_pages_are_read_too(site: Site) -> None:
    site.page("/short", b"<p>Hi <b>you")
    assert "Hi you" in (await fetch(f"http://site.test:{site.port}/short", site)).text
    site.page("/deep", b"<div>" * 20_000 + b"deep")
    assert not (await fetch(f"http://site.test:{site.port}/deep", site)).is_error
    site.page("/nothing", b"")
    assert not (await fetch(f"http://site.test:{site.port}/nothing", site)).is_error


@pytest.mark.parametrize(
    ("body", "kind", "expected"),
    [
        (b'{"a": 1}', "application/json", '{"a": 1}'),
        (b"a,b", "text/csv; charset=utf-8", "a,b"),
        ("Zürich".encode("latin-1"), "text/plain; charset=iso-8859-1", "Zürich"),
        ("Zürich".encode(), "text/plain; charset=no-such", "Zürich"),
        (b"<a/>", "application/rss+xml", "<a/>"),
        ("<p>Zürich is a city by a lake".encode("latin-1"), 'text/html; charset="latin-1"', "Zürich is"),
    ],
)
async def test_text_of_other_types(site: Site, body: bytes, kind: str, expected: str) -> None:
    site.page("/x", body, kind)
    result = await fetch(f"http://site.test:{site.port}/x", site)
    assert not result.is_error
    assert expected in result.text


async def test_packed_pages_are_unpacked(site: Site) -> None:
    site.page("/gzip", gzip.compress(b"hello"), "text/plain", content_encoding="gzip")
    site.page("/deflate", zlib.compress(b"hello"), "text/plain", content_encoding="deflate")
    for path in ("gzip", "deflate"):
        assert "hello" in (await fetch(f"http://site.test:{site.port}/{path}", site)).text


async def test_redirects_are_followed_within_the_limit(site: Site) -> None:
    site.redirect("/a", "/b", "301 Moved")
    site.redirect("/b", f"http://other.test:{site.port}/c", "307 Temporary")
    site.page("/c", b"there", "text/plain")
    result = await fetch(f"http://site.test:{site.port}/a", site)
    assert result.text == f"http://other.test:{site.port}/c\n\nthere"
    site.redirect("/loop", "/loop")
    result = await fetch(f"http://site.test:{site.port}/loop", site, max_redirects=3)
    assert result.is_error
    assert "more than 3 times" in result.text
    assert sum("/loop" in head for head in site.requests) == 4


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.8.8.8",
        "localhost",
        "0.0.0.0",
        "2130706433",
        "017700000001",
        "0177.0.0.1",
        "0x7f000001",
        "0x7f.0.0.1",
        "127.1",
        "127.0.0.1.",
        "2130706433.",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[::127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[64:ff9b:1::7f00:1]",
        "[2002:7f00:1::]",
        "[2001:0:7f00:1::]",
        "[fe80::1]",
        "[fc00::1]",
        "[ff02::1]",
        "10.0.0.1",
        "172.16.3.4",
        "192.168.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "①②⑦.⓪.⓪.①",
        "127。0。0。1",
    ],
)
async def test_addresses_that_are_not_public_are_refused(host: str, site: Site) -> None:
    """The server on loopback would answer; it hears nothing."""
    site.page("/", b"secret", "text/plain")
    result = await fetch(f"http://{host}:{site.port}/")
    assert result.is_error
    assert "secret" not in result.text
    assert (
        "not a public address" in result.text
        or "not an address" in result.text
        or "is not a URL" in result.text
    )
    assert site.requests == []


async def test_a_name_that_leads_to_loopback_is_refused(site: Site) -> None:
    for found in ([LOOPBACK], ["::1"], ["93.184.215.14", LOOPBACK], ["fe80::1%eth0"]):

        async def resolve(host: str, port: int, found: list[str] = found) -> list[str]:
            return found

        tool = FetchPage(FetchLimits(), GuardedNetwork(resolve))
        result = await tool.run({"url": f"http://rebind.test:{site.port}/"})
        assert "not a public address" in result.text
    assert site.requests == []


async def test_a_name_is_looked_up_once_and_that_answer_is_connected_to(site: Site) -> None:
    """A name server that gives another answer the second time gains nothing: there is no second time."""
    answers = [[LOOPBACK], ["10.0.0.1"]]

    async def resolve(host: str, port: int) -> list[str]:
        return answers.pop(0)

    site.page("/", b"hello", "text/plain")
    tool = FetchPage(FetchLimits(), GuardedNetwork(resolve, [(LOOPBACK, site.port)]))
    result = await tool.run({"url": f"http://rebind.test:{site.port}/"})
    assert "hello" in result.text
    assert answers == [["10.0.0.1"]]
    # The next connection looks up anew, and is judged anew.
    assert "10.0.0.1, which is not a public" in (await tool.run({"url": "http://rebind.test/"})).text


async def test_tls_is_for_the_name_though_the_connection_is_by_number(tmp_path: Path) -> None:
    ours, believing = certificate("site.test", tmp_path)
    names: list[str | None] = []
    ours.sni_callback = lambda _, name, __: names.append(name)

    async def resolve(host: str, port: int) -> list[str]:
        return [LOOPBACK]

    async with website(ours) as site:
        site.page("/", b"hello", "text/plain")
        network = GuardedNetwork(resolve, [(LOOPBACK, site.port)])
        tool = FetchPage(FetchLimits(), network, believing)
        assert "hello" in (await tool.run({"url": f"https://site.test:{site.port}/"})).text
        assert names == ["site.test"]
        # Another name at the same address has no such certificate, and strangers' are not believed.
        assert (await tool.run({"url": f"https://other.test:{site.port}/"})).is_error
        assert (
            await FetchPage(FetchLimits(), network).run({"url": f"https://site.test:{site.port}/"})
        ).is_error
    assert len(site.requests) == 1


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1:{other}/",
        "http://localhost:{other}/",
        "//2130706433:{other}/",
        "http://[::1]:{other}/",
    ],
)
async def test_a_redirect_to_loopback_is_refused(location: str, site: Site) -> None:
    async with website() as other:
        other.page("/", b"secret", "text/plain")
        site.redirect("/", location.format(other=other.port))
        result = await fetch(f"http://site.test:{site.port}/", site)
        assert result.is_error
        assert "secret" not in result.text
        assert other.requests == []
    assert len(site.requests) == 1


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("file:///etc/passwd", "only http and https"),
        ("gopher://site.test/", "only http and https"),
        ("http://user:pass@site.test/", "user name"),
        ("http://site.test:99999/", "no port 99999"),
    ],
)
async def test_other_redirects_are_refused(location: str, reason: str, site: Site) -> None:
    site.redirect("/", location)
    assert reason in (await fetch(f"http://site.test:{site.port}/", site)).text


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file:///etc/passwd", "only http and https"),
        ("ftp://example.org/", "only http and https"),
        ("/etc/passwd", "only http and https"),
        ("example.org", "only http and https"),
        ("", "only http and https"),
        ("http://", "names no host"),
        ("http:///x", "names no host"),
        ("http://user@example.org/", "user name"),
        ("http://example.org:99999/", "no port 99999"),
        ("http://a\nb/", "not a URL"),
        ("http://unresolvable.invalid/", "cannot be resolved"),
    ],
)
async def test_what_is_no_web_address_is_refused(url: str, reason: str) -> None:
    result = await fetch(url)
    assert result.is_error
    assert reason in result.text


async def test_the_arguments_are_checked() -> None:
    for arguments in (
        {},
        {"url": 5},
        {"url": "http://x/" + "y" * 2048},
        {"url": "http://x", "method": "POST"},
    ):
        result = await FetchPage(FetchLimits()).run(arguments)
        assert result.is_error
        assert "do not fit" in result.text


async def test_large_pages_are_not_read(site: Site) -> None:
    site.page("/large", b"x" * 100_001, "text/plain")
    site.page("/fits", b"x" * 100_000, "text/plain")
    bomb = gzip.compress(b"\0" * 50_000_000)
    site.page("/bomb", bomb, "text/plain", content_encoding="gzip")
    assert len(bomb) < 100_000
    for path in ("large", "bomb"):
        result = await fetch(f"http://site.test:{site.port}/{path}", site, max_bytes=100_000)
        assert "more than 100000 bytes" in result.text
    assert not (await fetch(f"http://site.test:{site.port}/fits", site, max_bytes=100_000)).is_error


@pytest.mark.parametrize(
    ("kind", "headers", "reason"),
    [
        ("image/png", {}, "image/png, which is not text"),
        ("application/octet-stream", {}, "not text"),
        (None, {}, "(none given)"),
        ("text/plain", {"content_encoding": "br"}, "packed as br"),
        ("text/plain", {"content_encoding": "gzip"}, "packing is broken"),
    ],
)
async def test_other_content_is_refused(
    site: Site, kind: str | None, headers: dict[str, str], reason: str
) -> None:
    site.page("/x", b"content", kind, **headers)
    result = await fetch(f"http://site.test:{site.port}/x", site)
    assert result.is_error
    assert reason in result.text


async def test_servers_that_misbehave_are_errors(site: Site) -> None:
    site.pages["/garbage"] = lambda writer: _write(writer, b"not http\r\n\r\n")
    site.pages["/cut"] = lambda writer: _write(
        writer, b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 99\r\n\r\nx"
    )
    site.pages["/teapot"] = answer("418 Teapot", {}, b"")
    for path, reason in (("garbage", "cannot be read"), ("cut", "cannot be read"), ("teapot", "status 418")):
        result = await fetch(f"http://site.test:{site.port}/{path}", site)
        assert result.is_error
        assert reason in result.text
    async with website() as gone:
        port = gone.port
    result = await FetchPage(FetchLimits(), GuardedNetwork(exempt=[(LOOPBACK, port)])).run(
        {"url": f"http://127.0.0.1:{port}/"}
    )
    assert "cannot be read" in result.text


async def _write(writer: asyncio.StreamWriter, content: bytes) -> None:
    writer.write(content)
    await writer.drain()


async def test_a_slow_page_is_stopped_and_its_connection_closed(site: Site) -> None:
    site.trickle("/slow")
    tool = FetchPage(FetchLimits(), GuardedNetwork(exempt=[(LOOPBACK, site.port)]))
    box = Toolbox([tool], policy=Policy(("fetch_page",)), timeout_s=0.5)
    outcome = await box.run("fetch_page", {"url": f"http://127.0.0.1:{site.port}/slow"})
    assert (outcome.status, outcome.text) == ("error", "fetch_page was stopped after 0.5 seconds.")
    await asyncio.wait_for(site.gone.wait(), 10)


async def test_it_is_off_unless_allowed() -> None:
    assert not toolbox_from(Settings()).is_allowed("fetch_page")
    box = toolbox_from(Settings(tools=ToolsSettings(allow=("fetch_page",))))
    assert box.is_allowed("fetch_page")
    outcome = await box.run("fetch_page", {"url": "http://127.0.0.1/"})
    assert "not a public address" in outcome.text


@pytest.mark.parametrize("text", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "64:ff9b::808:808"])
def test_public_addresses_are_public(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize(
    "text", ["192.88.99.1", "198.18.0.1", "203.0.113.9", "168.63.129.16", "fec0::1", "::8.8.8.8"]
)
def test_other_special_addresses_are_not(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))
    assert not is_public(ipaddress.ip_address("2606:4700::5efe:7f00:1"))


async def test_sockets_of_the_machine_are_refused() -> None:
    with pytest.raises(Forbidden):
        await GuardedNetwork().connect_unix_socket("/run/docker.sock")
