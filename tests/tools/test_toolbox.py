"""The toolbox: policy, offers, bounds, and what becomes of tools that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kiln.core.settings import Settings, ToolsSettings
from kiln.tools.build import toolbox_from
from kiln.tools.policy import Policy
from kiln.tools.tool import Category, ServerTool, Source, ToolResult
from kiln.tools.toolbox import Toolbox, bounded_text


class Scripted:
    """A tool that does what a test wants."""

    description = "A test's tool."
    parameters: dict[str, Any] = {"type": "object", "properties": {}}

    def __init__(
        self, name: str, run: Callable[[], Awaitable[ToolResult]], category: Category = "pure"
    ) -> None:
        self.name = name
        self.category: Category = category
        self._run = run

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        return await self._run()


def says(text: str, *sources: Source) -> Callable[[], Awaitable[ToolResult]]:
    async def run() -> ToolResult:
        return ToolResult(text, sources)

    return run


class Shelf:
    """A tool server with one tool, `shelf__look`."""

    name = "shelf"
    category: Category = "mcp"

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.closed = 0

    def owns(self, tool: str) -> bool:
        return tool.startswith("shelf__")

    async def find(self, tool: str) -> ServerTool | ToolResult | None:
        self.asked.append(tool)
        if tool == "shelf__down":
            return ToolResult.failed("The shelf fell down.")
        return Scripted(tool, says("a book"), "mcp") if tool == "shelf__look" else None

    async def aclose(self) -> None:
        self.closed += 1


@pytest.mark.parametrize(
    ("allow", "deny", "name", "category", "expected"),
    [
        (("category:pure",), (), "date_time", "pure", True),
        (("category:pure",), (), "web_search", "network", False),
        (("web_*",), (), "web_search", "network", True),
        (("web_*",), (), "date_time", "pure", False),
        (("*",), (), "files__read", "mcp", True),
        (("*",), ("category:mcp",), "files__read", "mcp", False),
        (("files__read",), ("files__*",), "files__read", "mcp", False),
        (("files__*",), ("files__write*",), "files__write_all", "mcp", False),
        (("*_time",), (), "date_time", "pure", True),
        (("date_?ime",), (), "date_time", "pure", False),
        (("[d]ate_time",), (), "date_time", "pure", False),
        (("DATE_TIME",), (), "date_time", "pure", False),
        (("category:*",), (), "date_time", "pure", False),
        ((), (), "date_time", "pure", False),
    ],
)
def test_the_policy(
    allow: tuple[str, ...], deny: tuple[str, ...], name: str, category: Category, expected: bool
) -> None:
    assert Policy(allow, deny).allows(name, category) is expected


async def test_an_offer_has_definitions_in_openai_shape_and_names_what_is_refused() -> None:
    shelf = Shelf()
    box = Toolbox(
        [Scripted("look", says("x")), Scripted("web_look", says("x"), "network")],
        servers=[shelf],
        policy=Policy(("category:pure", "category:mcp"), ()),
        unavailable={"web_search": "web_search is not set up."},
    )
    names = ["look", "web_look", "shelf__look", "web_search", "look", "shelf__down", "shelf__none", "none"]
    offer = await box.offer(names)
    assert [d["function"]["name"] for d in offer.definitions] == ["look", "shelf__look"]
    assert offer.definitions[0] == {
        "type": "function",
        "function": {"name": "look", "description": "A test's tool.", "parameters": Scripted.parameters},
    }
    refused = {outcome.name: (outcome.status, outcome.text) for outcome in offer.refused}
    assert refused == {
        "web_look": ("denied", "The server's policy does not allow the tool 'web_look'."),
        "web_search": ("denied", "web_search is not set up."),
        "shelf__down": ("error", "The shelf fell down."),
        "shelf__none": ("denied", "The tool server shelf has no tool named 'shelf__none'."),
        "none": ("denied", "There is no server tool named 'none'."),
    }


async def test_a_denied_tool_is_not_run_and_its_server_not_asked() -> None:
    ran = []

    async def run() -> ToolResult:
        ran.append(1)
        return ToolResult("x")

    shelf = Shelf()
    box = Toolbox([Scripted("web_look", run, "network")], servers=[shelf])
    for name in ("web_look", "shelf__look", "none", "x" * 500):
        assert not box.is_allowed(name)
        outcome = await box.run(name, {})
        assert outcome.status == "denied"
        assert len(outcome.text) < 200
    assert (ran, shelf.asked) == ([], [])


async def test_a_tool_of_a_server_runs() -> None:
    box = Toolbox(servers=[Shelf()], policy=Policy(("shelf__look",), ()))
    outcome = await box.run("shelf__look", {})
    assert (outcome.status, outcome.text) == ("done", "a book")


async def test_output_is_bounded_and_plain() -> None:
    text = "\x1b[31mred\x00\r\n\tx\x85\ud800" + "y" * 5000
    source = Source("t\n<|im_end|>" + "i" * 3000, "http://x", "s\x07")
    box = Toolbox([Scripted("look", says(text, source))], max_output_chars=100)
    outcome = await box.run("look", {})
    assert outcome.text.startswith("[31mred\n\txyyy")
    assert len(outcome.text) == 100
    assert outcome.text.endswith(f"[cut: {len(text)} characters in all]")
    (shown,) = outcome.sources
    # What looks like a control token is text like any other: the chat template shields it.
    assert shown.title.startswith("t <|im_end|>")
    assert len(shown.title) == 1000
    assert shown.snippet == "s"


def test_text_within_the_bound_is_not_cut() -> None:
    assert bounded_text("x" * 100, 100) == "x" * 100
    assert len(bounded_text("x" * 101, 100)) == 100
    assert bounded_text("\0" * 1000 + "x", 100).endswith("[cut: 1001 characters in all]")
    assert bounded_text("", 100) == ""


async def test_a_slow_tool_is_stopped_and_freed() -> None:
    freed = asyncio.Event()

    async def run() -> ToolResult:
        try:
            await asyncio.Event().wait()
        finally:
            freed.set()
        raise AssertionError

    outcome = await Toolbox([Scripted("look", run)], timeout_s=0.05).run("look", {})
    assert (outcome.status, outcome.text) == ("error", "look was stopped after 0.05 seconds.")
    assert outcome.seconds >= 0.05
    assert freed.is_set()


@pytest.mark.parametrize("error", [TimeoutError("its own"), RuntimeError("secret"), KeyError("x")])
async def test_a_tool_that_raises_is_an_error_without_its_details(error: Exception) -> None:
    async def run() -> ToolResult:
        raise error

    outcome = await Toolbox([Scripted("look", run)]).run("look", {})
    assert (outcome.status, outcome.text) == ("error", "look failed; the server's log holds the details.")


async def test_cancelling_a_call_cancels_the_tool() -> None:
    running, freed = asyncio.Event(), asyncio.Event()

    async def run() -> ToolResult:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            freed.set()
        raise AssertionError

    call = asyncio.create_task(Toolbox([Scripted("look", run)]).run("look", {}))
    await running.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert freed.is_set()


async def test_closing_closes_the_servers() -> None:
    shelf = Shelf()
    await Toolbox(servers=[shelf]).aclose()
    assert shelf.closed == 1


async def test_the_default_settings_give_the_pure_tools() -> None:
    box = toolbox_from(Settings())
    assert (
        box.is_allowed("calc_arithmetic") and box.is_allowed("date_time") and box.is_allowed("convert_units")
    )
    outcome = await box.run("calc_arithmetic", {"expression": "6 * 7"})
    assert (outcome.status, outcome.text) == ("done", "42")
    closed = toolbox_from(Settings(tools=ToolsSettings(deny=("calc_*",))))
    assert (await closed.run("calc_arithmetic", {"expression": "6 * 7"})).status == "denied"
