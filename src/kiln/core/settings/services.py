"""The settings of what the server offers around inference: profiles, tools, files, skills, access, memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kiln.core.settings.declare import BadValue, is_web_address, setting

TOOL_CATEGORIES = ("pure", "network", "mcp")


@dataclass(frozen=True, slots=True)
class OpenaiSettings:
    """The OpenAI-compatible profile under `/v1/openai`."""

    content_filter: str | None = setting(
        None,
        "Function that visible answers must pass, `module:function`; docs/openai.md has its contract.",
        high=256,
    )
    price_prompt: float | None = setting(
        None, "Dollars a million prompt tokens; with price_completion it makes `estimated_cost`.", low=0
    )
    price_cached_prompt: float | None = setting(
        None, "The same for prompt tokens from the prefix cache; unset, price_prompt.", low=0
    )
    price_completion: float | None = setting(None, "Dollars a million completion tokens.", low=0)

    def __post_init__(self) -> None:
        if self.content_filter is not None and not re.fullmatch(
            r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", self.content_filter
        ):
            raise BadValue("openai.content_filter must be `module:function`")
        if (self.price_prompt is None) != (self.price_completion is None):
            raise BadValue("openai.price_prompt and openai.price_completion must be set both or neither")
        if self.price_cached_prompt is not None and self.price_prompt is None:
            raise BadValue("openai.price_cached_prompt needs openai.price_prompt")


@dataclass(frozen=True, slots=True)
class NativeSettings:
    """The native chat under `/lmkit/v1`."""

    max_rounds: int = setting(
        8, "Rounds of generation in one exchange; in the last one the server offers no tools.", low=2, high=64
    )


@dataclass(frozen=True, slots=True)
class EmbeddingSettings:
    """The model behind `POST /v1/openai/embeddings`."""

    model_path: str | None = setting(
        None, "A .gguf file, or a hub reference as in model.path; unset, there are no embeddings."
    )
    pooling: str = setting(
        "auto",
        "How the vectors of tokens become one: `auto` as the file says, the mean where it says nothing.",
        choices=("auto", "mean", "cls", "last"),
    )


@dataclass(frozen=True, slots=True)
class ToolsSettings:
    """Which tools the server runs for a model, and within which bounds."""

    allow: tuple[str, ...] = setting(
        ("category:pure",),
        "Tools that may run: names with `*` for any characters, or `category:` and a category.",
    )
    deny: tuple[str, ...] = setting((), "Tools that may not run, written as in allow, which it outweighs.")
    timeout_s: float = setting(30.0, "Seconds that one tool call may take.", above=0, high=3600)
    max_output_chars: int = setting(
        16_384, "Characters of a tool's output that the model gets to read.", low=64, high=1_048_576
    )
    search_provider: str | None = setting(
        None, "Where web_search looks things up; unset, there is no such tool.", choices=("searxng", "ddgs")
    )
    searxng_url: str | None = setting(
        None, "Base URL of the SearXNG instance that web_search asks.", high=2048
    )
    search_results: int = setting(5, "Results of a web search at most.", low=1, high=20)
    fetch_max_bytes: int = setting(
        2_097_152, "Bytes of a page that fetch_page reads at most, unpacked.", low=1024, high=2**30
    )
    fetch_max_redirects: int = setting(5, "Redirects that fetch_page follows at most.", low=0, high=20)

    def __post_init__(self) -> None:
        for key in ("allow", "deny"):
            for entry in getattr(self, key):
                category = entry.removeprefix("category:")
                if category != entry and category not in TOOL_CATEGORIES:
                    known = ", ".join(f"category:{name}" for name in TOOL_CATEGORIES)
                    raise BadValue(f"tools.{key} names {entry}: the categories are {known}")
        if (self.search_provider == "searxng") != (self.searxng_url is not None):
            raise BadValue("tools.searxng_url must be set if tools.search_provider is searxng, and only then")
        if self.searxng_url is not None and not is_web_address(self.searxng_url):
            raise BadValue("tools.searxng_url must be a http or https URL")


@dataclass(frozen=True, slots=True)
class FilesSettings:
    """Bounds of the files that come with messages."""

    max_files: int = setting(16, "Files that one request may have.", low=0, high=1024)
    max_bytes: int = setting(8_388_608, "Bytes that one file may have.", low=1, high=2**31 - 1)
    max_chars: int = setting(400_000, "Characters of text that one file may hold.", low=1, high=2**26)
    max_pages: int = setting(200, "Pages that one PDF may have.", low=1, high=100_000)
    timeout_s: float = setting(
        20.0, "Seconds that reading the PDFs of one request may take.", above=0, high=3600
    )
    max_memory_bytes: int = setting(
        1_073_741_824, "Bytes of memory that reading one PDF may take.", low=268_435_456
    )
    parallel: int = setting(2, "PDFs read at the same time at most.", low=1, high=64)


@dataclass(frozen=True, slots=True)
class McpServerSettings:
    """One server of the Model Context Protocol: a program to start, or an address to reach."""

    command: str | None = setting(None, "Program that is started and spoken to over its standard streams.")
    args: tuple[str, ...] = setting((), "Arguments of the program.")
    env: Mapping[str, str] | None = setting(
        None, "Environment variables of the program, a table of texts; never shown.", secret=True
    )
    cwd: str | None = setting(None, "Working directory of the program; unset, that of kiln.")
    url: str | None = setting(None, "Address of a server that speaks streamable HTTP.", high=2048)
    headers: Mapping[str, str] | None = setting(
        None, "Headers sent to that address, a table of texts; never shown.", secret=True
    )
    timeout_s: float = setting(
        30.0, "Seconds that the server may take to start and to list its tools.", above=0, high=3600
    )

    def __post_init__(self) -> None:
        if (self.command is None) == (self.url is None):
            raise BadValue("either command or url must be set, and not both")
        if self.command is None and (self.args or self.env is not None or self.cwd is not None):
            raise BadValue("args, env and cwd go with command, not with url")
        if self.url is None and self.headers is not None:
            raise BadValue("headers goes with url, not with command")
        if self.url is not None and not is_web_address(self.url):
            raise BadValue("url must be a http or https URL")


@dataclass(frozen=True, slots=True)
class SkillsSettings:
    """Skills that requests may use."""

    dir: str | None = setting(
        None, "Folder of skills, each a folder with a SKILL.md; read again when they change."
    )


@dataclass(frozen=True, slots=True)
class AgentsSettings:
    """Agents that requests may adopt."""

    dir: str | None = setting(
        None, "Folder of agents, each a file `<name>.toml`; read again when they change."
    )


@dataclass(frozen=True, slots=True)
class AuthSettings:
    """Who may use the server."""

    anonymous: bool | None = setting(
        None,
        "Whether requests without an API key are served; unset, only if server.host is a loopback address.",
    )
    session_hours: float = setting(
        12.0, "Hours until a browser's session ends by itself.", above=0, high=8760
    )


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Where API keys and memory are kept."""

    path: str | None = setting(
        None, "SQLite file of keys and memory; unset, kiln/kiln.db in the user's state directory.", high=4096
    )
    memory: bool = setting(
        True, "Whether requests may use memory; where not, those that name one are answered without."
    )


@dataclass(frozen=True, slots=True)
class MemoryStoreSettings:
    """The policy of a memory store: what is recalled, kept and learned in the memories under it."""

    recall_depth: int = setting(8, "Facts that an exchange gets to see at most.", low=1, high=64)
    capacity: int = setting(1000, "Facts of one memory; what exceeds them is forgotten.", low=1, high=100_000)
    eviction: str = setting(
        "lru",
        "Which facts are forgotten first: those used longest ago, the oldest, or the least often used.",
        choices=("lru", "oldest", "least_used"),
    )
    half_life_days: float | None = setting(
        None, "Days without use after which a fact counts half in the recall; unset, it never fades.", above=0
    )
    extraction: bool = setting(True, "Whether facts are extracted from exchanges by themselves.")
    dedup_threshold: float = setting(
        0.9,
        "From which similarity on a new fact replaces an old one; 1 only if they are equal.",
        above=0,
        high=1,
    )
