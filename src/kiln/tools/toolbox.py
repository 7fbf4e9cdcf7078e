"""The tools that are there, which of them may run, and running one within its bounds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kiln.tools.policy import Policy
from kiln.tools.tool import Category, Outcome, ServerTool, Source, Status, ToolResult

logger = logging.getLogger(__name__)

SOURCE_CHARS = 1000


class ToolServer(Protocol):
    """Something that has tools which are known only once it was asked: a server of another protocol."""

    @property
    def name(self) -> str: ...
    @property
    def category(self) -> Category: ...

    def owns(self, tool: str) -> bool:
        """Whether a tool of this name would be one of this server's."""
        ...

    async def find(self, tool: str) -> ServerTool | ToolResult | None:
        """The tool; None if there is none of that name; an error if the server could not be asked."""
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Offer:
    """Tools for one exchange: their definitions in OpenAI's shape, and those that cannot be had, with the
    status and the reason to narrate."""

    definitions: tuple[dict[str, Any], ...]
    refused: tuple[Outcome, ...]


class Toolbox:
    """All server tools under one policy. One a server; its methods may run at the same time."""

    def __init__(
        self,
        tools: Iterable[ServerTool] = (),
        *,
        servers: Sequence[ToolServer] = (),
        policy: Policy | None = None,
        timeout_s: float = 30.0,
        max_output_chars: int = 16_384,
        unavailable: Mapping[str, str] | None = None,
    ) -> None:
        """`unavailable` says of tools that exist but are not set up what would set them up."""
        self._tools = {tool.name: tool for tool in tools}
        self._servers = tuple(servers)
        self._policy = policy or Policy()
        self._timeout_s = timeout_s
        self._max_output_chars = max_output_chars
        self._unavailable = dict(unavailable or {})

    @property
    def tools(self) -> tuple[ServerTool, ...]:
        """The built-in tools that are set up, allowed or not. Those of tool servers are not among them."""
        return tuple(self._tools.values())

    def is_allowed(self, name: str) -> bool:
        """Whether a tool of this name may run. A name that belongs to no tool may not."""
        category = self.category_of(name)
        return category is not None and self._policy.allows(name, category)

    def category_of(self, name: str) -> Category | None:
        """The category of the tool that has, or would have, this name; None for a name of no tool."""
        owner = self._tools.get(name) or self._server_of(name)
        return owner.category if owner is not None else None

    async def offer(self, names: Iterable[str]) -> Offer:
        """The definitions of the tools named, each once, in the order given. Asks tool servers if need be."""
        found = await asyncio.gather(*(self._find(name) for name in dict.fromkeys(names)))
        definitions = tuple(_definition(tool) for tool in found if not isinstance(tool, Outcome))
        return Offer(definitions, tuple(tool for tool in found if isinstance(tool, Outcome)))

    async def run(self, name: str, arguments: dict[str, Any]) -> Outcome:
        """Run one call to its end, its failure or its time limit. Raises nothing but its cancellation."""
        began = time.monotonic()
        tool = await self._find(name)
        if isinstance(tool, Outcome):
            return replace(tool, seconds=time.monotonic() - began)
        result = await self._run_bounded(tool, arguments)
        status: Status = "error" if result.is_error else "done"
        text = bounded_text(result.text, self._max_output_chars)
        sources = tuple(_bounded_source(source) for source in result.sources)
        return Outcome(name, status, text, time.monotonic() - began, sources, timed_out=result.timed_out)

    async def aclose(self) -> None:
        """End the tool servers and wait for them."""
        await asyncio.gather(*(server.aclose() for server in self._servers))

    async def _run_bounded(self, tool: ServerTool, arguments: dict[str, Any]) -> ToolResult:
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await tool.run(arguments)
        except TimeoutError:
            if limit.expired():
                text = f"{tool.name} was stopped after {self._timeout_s:g} seconds."
                return ToolResult(text, is_error=True, timed_out=True)
            logger.exception("the tool %s failed", tool.name)
        except Exception:
            logger.exception("the tool %s failed", tool.name)
        return ToolResult.failed(f"{tool.name} failed; the server's log holds the details.")

    async def _find(self, name: str) -> ServerTool | Outcome:
        tool = self._tools.get(name)
        server = None if tool is not None else self._server_of(name)
        if tool is None and server is None:
            reason = self._unavailable.get(name, f"There is no server tool named {_quoted(name)}.")
            return Outcome(name, "denied", reason)
        if not self.is_allowed(name):
            return Outcome(name, "denied", f"The server's policy does not allow the tool {_quoted(name)}.")
        if tool is not None:
            return tool
        assert server is not None
        found = await server.find(name)
        if found is None:
            return Outcome(
                name, "denied", f"The tool server {server.name} has no tool named {_quoted(name)}."
            )
        if isinstance(found, ToolResult):
            return Outcome(name, "error", bounded_text(found.text, self._max_output_chars))
        return found

    def _server_of(self, name: str) -> ToolServer | None:
        return next((server for server in self._servers if server.owns(name)), None)


def bounded_text(text: str, most: int) -> str:
    """`text` without control characters but newline and tab, of at most `most` characters; a cut is noted."""
    # One more than is kept, so that a cut shows; what lies beyond is never looked at.
    kept = "".join(char for char in text[: 2 * most + 2] if _is_text(char))
    if len(kept) <= most and len(text) <= 2 * most + 2:
        return kept
    note = f"\n[cut: {len(text)} characters in all]"
    return kept[: max(0, most - len(note))] + note


def _is_text(char: str) -> bool:
    # Beside the control characters, lone surrogates go: they have no UTF-8 form.
    return char in "\n\t" or not (char < " " or "\x7f" <= char <= "\x9f" or "\ud800" <= char <= "\udfff")


def _bounded_source(source: Source) -> Source:
    def line(text: str) -> str:
        return bounded_text(text.replace("\n", " "), SOURCE_CHARS)

    return Source(line(source.title), line(source.url), line(source.snippet))


def _definition(tool: ServerTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _quoted(name: str) -> str:
    return repr(name if len(name) <= 64 else name[:61] + "...")
