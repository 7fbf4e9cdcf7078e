"""Tools of MCP servers: over stdio and HTTP, from servers that work, hang, die and talk nonsense."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kiln.cli.embedded import serve_app
from kiln.core.settings import McpServerSettings, Settings, ToolsSettings
from kiln.tools.build import toolbox_from
from kiln.tools.mcp import program
from kiln.tools.mcp.server import McpServer
from kiln.tools.policy import Policy
from kiln.tools.toolbox import Toolbox

HERE = Path(__file__).parent
Boxes = Callable[..., Toolbox]


def good(**more: object) -> McpServerSettings:
    return McpServerSettings(command=sys.executable, args=(str(HERE / "mcp_good.py"),), timeout_s=60, **more)  # type: ignore[arg-type]


def odd(behaviour: str, timeout_s: float = 60) -> McpServerSettings:
    arguments = (str(HERE / "mcp_odd.py"), behaviour)
    return McpServerSettings(command=sys.executable, args=arguments, timeout_s=timeout_s)


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that do not end by themselves are killed sooner than in earnest."""
    monkeypatch.setattr(program, "GRACE_S", 0.3)


@pytest.fixture
async def box() -> AsyncIterator[Boxes]:
    """Makes toolboxes with one server named `it`, and ends them."""
    made: list[Toolbox] = []

    def make(settings: McpServerSettings, timeout_s: float = 60) -> Toolbox:
        server = McpServer("it", settings)
        made.append(Toolbox(servers=[server], policy=Policy(("category:mcp",)), timeout_s=timeout_s))
        return made[-1]

    yield make
    for toolbox in made:
        await toolbox.aclose()


def is_running(pid: int) -> bool:
    """Whether the process is there, a zombie included."""
    return Path(f"/proc/{pid}").exists()


async def test_tools_are_offered_and_run(box: Boxes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOT_PASSED", "leaked")
    toolbox = box(good(env={"TOKEN": "given"}))
    offer = await toolbox.offer(["it__add", "it__none"])
    (definition,) = offer.definitions
    function = definition["function"]
    assert (function["name"], function["description"]) == ("it__add", "Add two numbers.")
    assert set(function["parameters"]["properties"]) == {"a", "b"}
    assert [(o.name, o.status) for o in offer.refused] == [("it__none", "denied")]

    outcome = await toolbox.run("it__add", {"a": 40, "b": 2})
    assert (outcome.status, outcome.text) == ("done", "42")
    failed = await toolbox.run("it__fail", {})
    assert failed.status == "error"
    assert "out of clay" in failed.text
    wrong = await toolbox.run("it__add", {"a": "many"})
    assert wrong.status == "error"
    # Only what the configuration names reaches the program.
    assert (await toolbox.run("it__secret", {})).text == "given none"

    pids = await asyncio.gather(*(toolbox.run("it__pid", {}) for _ in range(5)))
    assert len({outcome.text for outcome in pids}) == 1
    pid = int(pids[0].text)
    assert is_running(pid)

    # A call that is cancelled, as by a caller who goes away, leaves the others and the server.
    long = asyncio.create_task(toolbox.run("it__sleep", {"seconds": 600}))
    short = asyncio.create_task(toolbox.run("it__sleep", {"seconds": 1.0}))
    await asyncio.sleep(0.2)
    long.cancel()
    with pytest.raises(asyncio.CancelledError):
        await long
    assert (await short).text == "awake"
    assert (await toolbox.run("it__pid", {})).text == str(pid)

    await toolbox.aclose()
    assert not is_running(pid)
    # What comes after the end starts nothing.
    late = await toolbox.run("it__add", {"a": 1, "b": 1})
    assert (late.status, "shutting down" in late.text) == ("error", True)


async def test_one_that_hangs_is_an_error_and_is_started_anew(box: Boxes) -> None:
    toolbox = box(odd("hang", timeout_s=2), timeout_s=10)
    first = await toolbox.run("it__pid", {})
    hung = Toolbox(servers=toolbox._servers, policy=Policy(("*",)), timeout_s=1)
    outcome = await hung.run("it__act", {})
    assert (outcome.status, outcome.text) == ("error", "it__act was stopped after 1 seconds.")
    second = await toolbox.run("it__pid", {})
    assert second.status == "done"
    assert second.text != first.text
    await toolbox.aclose()
    assert not is_running(int(first.text))
    assert not is_running(int(second.text))


async def test_one_that_dies_is_an_error_and_is_started_anew(box: Boxes) -> None:
    toolbox = box(odd("die"))
    first = await toolbox.run("it__pid", {})
    outcome = await toolbox.run("it__act", {})
    assert outcome.status == "error"
    assert "it__act failed" in outcome.text
    second = await toolbox.run("it__pid", {})
    assert (second.status, second.text != first.text) == ("done", True)
    assert not is_running(int(first.text))


async def test_one_that_was_killed_meanwhile_is_started_anew(box: Boxes) -> None:
    toolbox = box(odd("names"))
    first = await toolbox.run("it__pid", {})
    os.kill(int(first.text), 9)
    while is_running(int(first.text)):
        await asyncio.sleep(0.01)
    second = await toolbox.run("it__pid", {})
    if second.status == "error":
        # The call was written before the end of the server was read. It ends as an error, the next does not.
        second = await toolbox.run("it__pid", {})
    assert (second.status, second.text != first.text) == ("done", True)


@pytest.mark.parametrize("behaviour", ["endless-line", "endless-lines"])
async def test_one_that_floods_is_cut_off(
    behaviour: str, box: Boxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "LINE_BYTES", 1_000_000)
    # The time to start is long: what ends it is the bound on what it writes.
    outcome = await box(odd(behaviour, timeout_s=600)).run("it__act", {})
    assert outcome.status == "error"
    assert outcome.text.startswith("The tool server it cannot be used: ")


async def test_stray_lines_are_passed_over(box: Boxes) -> None:
    assert (await box(odd("banner")).run("it__pid", {})).status == "done"


async def test_children_of_a_server_end_with_it(box: Boxes) -> None:
    toolbox = box(odd("parent"))
    child = int((await toolbox.run("it__act", {})).text)
    assert is_running(child)
    await toolbox.aclose()
    # The child was the server's; whoever inherited it collects it.
    while is_running(child) and "Z" not in Path(f"/proc/{child}/stat").read_text():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("behaviour", ["silent", "exit", "garbage", "nonsense"])
async def test_one_that_does_not_speak_the_protocol_is_an_error(behaviour: str, box: Boxes) -> None:
    toolbox = box(odd(behaviour, timeout_s=0.7))
    outcomes = await asyncio.gather(*(toolbox.run("it__act", {}) for _ in range(3)))
    for outcome in outcomes:
        assert outcome.status == "error"
        assert outcome.text.startswith("The tool server it cannot be used: ")
    offer = await toolbox.offer(["it__act"])
    assert [(o.name, o.status) for o in offer.refused] == [("it__act", "error")]


async def test_changed_tools_are_listed_anew(box: Boxes) -> None:
    toolbox = box(odd("changes"))

    async def described() -> str:
        offer = await toolbox.offer(["it__act"])
        text: str = offer.definitions[0]["function"]["description"]
        return text

    assert await described() == "Called 0 times."
    await toolbox.run("it__act", {})
    assert await described() == "Called 1 times."


async def test_a_stubborn_one_is_killed(box: Boxes) -> None:
    toolbox = box(odd("stubborn", timeout_s=1))
    assert (await toolbox.run("it__act", {})).status == "error"
    await toolbox.aclose()
    assert [p for p in Path("/proc").iterdir() if p.name.isdigit() and _runs_stubborn(p)] == []


def _runs_stubborn(process: Path) -> bool:
    try:
        parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
        return parent == str(os.getpid()) and b"stubborn" in (process / "cmdline").read_bytes()
    except OSError:
        return False


async def test_a_result_that_is_none_is_an_error(box: Boxes) -> None:
    outcome = await box(odd("invalid")).run("it__act", {})
    assert outcome.status == "error"
    assert "no usable result" in outcome.text


async def test_names_are_made_to_fit_or_left_out(box: Boxes) -> None:
    toolbox = box(odd("names"))
    assert (await toolbox.run("it__files_read", {})).text == "files.read"
    for name in ("it__no\u00fc", "it__" + "x" * 80):
        assert (await toolbox.run(name, {})).status == "denied"


async def test_a_program_that_is_not_there_is_an_error(box: Boxes) -> None:
    outcome = await box(McpServerSettings(command="/no/such/program")).run("it__act", {})
    assert (outcome.status, outcome.text) == (
        "error",
        "The tool server it cannot be used: its program is not there.",
    )


async def test_nothing_is_started_before_it_is_used_and_allowed(tmp_path: Path) -> None:
    mark = tmp_path / "started"
    server = McpServerSettings(command=sys.executable, args=("-c", f"open({str(mark)!r}, 'w')"))
    closed = toolbox_from(Settings(mcp={"it": server}))
    assert (await closed.run("it__act", {})).status == "denied"
    assert (await closed.offer(["it__act", "calc_arithmetic"])).refused[0].status == "denied"
    await closed.aclose()
    assert not mark.exists()
    opened = toolbox_from(Settings(mcp={"it": server}, tools=ToolsSettings(allow=("it__*",))))
    assert (await opened.run("it__act", {})).status == "error"
    await opened.aclose()
    assert mark.exists()


@contextmanager
def served() -> Iterator[str]:
    """The well-behaved server over streamable HTTP on loopback; its URL."""
    from . import mcp_good

    with serve_app(mcp_good.server.streamable_http_app()) as url:
        yield f"{url}/mcp"


async def test_tools_over_http(box: Boxes) -> None:
    with served() as url:
        toolbox = box(McpServerSettings(url=url, headers={"Authorization": "Bearer x"}))
        outcome = await toolbox.run("it__add", {"a": 40, "b": 2})
        assert (outcome.status, outcome.text) == ("done", "42")
        assert "out of clay" in (await toolbox.run("it__fail", {})).text
        await toolbox.aclose()


async def test_a_server_that_is_not_reached_over_http_is_an_error(box: Boxes) -> None:
    with served() as url:
        pass
    for address in (url, url.replace("/mcp", "/other")):
        outcome = await box(McpServerSettings(url=address, timeout_s=10)).run("it__add", {})
        assert outcome.status == "error"
        assert "cannot be used" in outcome.text
