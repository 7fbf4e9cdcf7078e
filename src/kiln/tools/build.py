"""The toolbox that the settings describe."""

from __future__ import annotations

from kiln.core.settings import Settings, ToolsSettings
from kiln.tools.arithmetic import CalcArithmetic
from kiln.tools.clock import DateTime
from kiln.tools.policy import Policy
from kiln.tools.tool import ServerTool
from kiln.tools.toolbox import Toolbox, ToolServer
from kiln.tools.units import ConvertUnits
from kiln.tools.web.fetch import FetchLimits, FetchPage
from kiln.tools.web.search import Ddgs, SearchProvider, SearXNG, WebSearch

NO_SEARCH = "The tool 'web_search' is not set up: the server's setting tools.search_provider is unset."


def toolbox_from(settings: Settings) -> Toolbox:
    """All tools that are set up, under the policy of the settings. Starts and reaches nothing."""
    configured = settings.tools
    limits = FetchLimits(configured.fetch_max_bytes, configured.fetch_max_redirects, configured.timeout_s)
    tools: list[ServerTool] = [CalcArithmetic(), DateTime(), ConvertUnits(), FetchPage(limits)]
    provider = _search_provider(configured)
    if provider is not None:
        tools.append(WebSearch(provider, configured.search_results))
    return Toolbox(
        tools,
        servers=_tool_servers(settings),
        policy=Policy(configured.allow, configured.deny),
        timeout_s=configured.timeout_s,
        max_output_chars=configured.max_output_chars,
        unavailable={} if provider is not None else {"web_search": NO_SEARCH},
    )


def _search_provider(settings: ToolsSettings) -> SearchProvider | None:
    if settings.searxng_url is not None:
        return SearXNG(settings.searxng_url, timeout_s=settings.timeout_s)
    return Ddgs(timeout_s=settings.timeout_s) if settings.search_provider == "ddgs" else None


def _tool_servers(settings: Settings) -> list[ToolServer]:
    if not settings.mcp:
        return []
    # Importing the protocol's library takes a second that others need not wait.
    from kiln.tools.mcp.server import McpServer

    return [McpServer(name, server) for name, server in settings.mcp.items()]
