"""Every setting of the server, declared once.

The sections below are the single source: the keys of kiln.toml, the names of environment
variables, the rows of `kiln config` and the tables of docs/configuration.md derive from them.
This module knows what a valid value is; where values are read from is the command line's affair.

A section has fixed keys. A family of tables with names of the user's choosing, as `[mcp.files]`, is a
dataclass in TABLES: its fields are declared with `_setting` as those of a section are, its
`__post_init__` raises BadValue where values do not go together or one is missing, and `Settings` has
a field of the family's name, a mapping from the free names to instances. Tables come from the file only.
To add a family: write the dataclass, add it to TABLES with the rule for its names, add the field to
`Settings`, and a table of its keys to docs/configuration.md. A setting that is `secret` is never shown.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")

MAX_INT = 2**63 - 1
SOURCES = ("default", "file", "environment", "flag")
TOOL_CATEGORIES = ("pure", "network", "mcp")


class BadValue(ValueError):
    """A value that its setting does not allow. The message says what is allowed, nothing else."""


def _setting(
    default: T,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] = (),
    unlimited: bool = False,
    secret: bool = False,
) -> T:
    """Declare one setting: `low` and `high` are inclusive bounds, `above` an exclusive one; of a text,
    `high` bounds the length in characters.

    With `unlimited`, the text `unlimited` stands for None. What is `secret` is never shown.
    """
    rules: dict[str, object] = {"low": low, "high": high, "above": above, "choices": choices}
    rules |= {"unlimited": unlimited, "secret": secret}
    return field(default=default, metadata={"doc": doc, **rules})


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The HTTP side and the defaults of a request."""

    host: str = _setting("127.0.0.1", "Address to listen on.")
    port: int = _setting(8420, "Port to listen on; 0 takes a free one.", low=0, high=65535)
    served_model_id: str | None = _setting(
        None, "Model ID the API answers to; unset, it is derived from the model.", high=256
    )
    default_thinking_budget_tokens: int | None = _setting(
        None, "Thinking tokens a request may use when it names no limit itself.", low=0, unlimited=True
    )
    default_thinking_budget_ms: int | None = _setting(
        None,
        "Milliseconds of thinking a request may use when it names no limit itself.",
        low=0,
        unlimited=True,
    )
    default_thinking_enabled: bool | None = _setting(
        None, "Whether requests think unless they say otherwise; unset, the chat template decides."
    )
    reasoning_low_tokens: int | None = _setting(
        512, "Thinking tokens of the reasoning effort `low`.", low=0, unlimited=True
    )
    reasoning_medium_tokens: int | None = _setting(
        2048, "Thinking tokens of the reasoning effort `medium`.", low=0, unlimited=True
    )
    reasoning_high_tokens: int | None = _setting(
        None, "Thinking tokens of the reasoning effort `high`.", low=0, unlimited=True
    )
    fold_reasoning_into_content: bool = _setting(
        False, "Copy the reasoning into the content too, unless the request says otherwise."
    )
    include_performance: bool = _setting(
        False, "Report performance metadata, unless the request says otherwise."
    )
    include_config_hashes: bool = _setting(
        False, "Report configuration hashes, unless the request says otherwise."
    )
    cors_origins: tuple[str, ...] = _setting(
        (), "Origins whose pages may call the server from a browser, as https://chat.example; `*` is all."
    )
    max_body_bytes: int = _setting(8_388_608, "Largest request body in bytes.", low=1)
    shutdown_grace_s: float = _setting(
        10.0, "Seconds that running requests get to finish at shutdown before they are cut.", low=0
    )
    log_level: str = _setting(
        "info", "Least severe log messages shown.", choices=("debug", "info", "warning", "error")
    )

    def __post_init__(self) -> None:
        for origin in self.cors_origins:
            if origin != "*" and re.fullmatch(r"https?://[^/\s?#@,*]+", origin) is None:
                raise BadValue(f"server.cors_origins names {origin}: an origin is as https://chat.example:8443")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model is served, and how its reasoning is told from its answer."""

    path: str | None = _setting(
        None,
        "A .gguf file, or a hub reference `owner/name[:quant-or-file]`; unset, the bundled model.",
    )
    reasoning_open: str | None = _setting(
        None, "Tag that opens reasoning; unset, found in the chat template. Goes with reasoning_close."
    )
    reasoning_close: str | None = _setting(
        None, "Tag that closes reasoning; unset, found in the chat template. Goes with reasoning_open."
    )
    seed_open_tag: str = _setting(
        "auto",
        "Whether kiln writes the open tag when thinking is on: `auto` where the template leaves it out.",
        choices=("auto", "always", "never"),
    )
    chat_template_file: str | None = _setting(
        None, "File with a Jinja chat template to use instead of the model's own."
    )
    memory_limit_mb: int | None = _setting(
        None,
        "Megabytes that all loaded models may take, weights and KV caches; unset, no bound."
        " The model idle longest makes room.",
        low=1,
        high=2**31 - 1,
    )
    adapter_dir: str | None = _setting(
        None, "Directory of LoRA adapters in PEFT format, one folder each; unset, there are none."
    )
    adapter: str | None = _setting(
        None, "Adapter of requests that name none; unset, they get the base model.", high=128
    )
    adapter_cache_dir: str | None = _setting(
        None, "Where converted adapters are kept; unset, inside adapter_dir."
    )
    adapter_max_bytes: int = _setting(1_073_741_824, "Largest adapter in bytes, packed or not.", low=1)
    adapter_quota_bytes: int | None = _setting(
        None, "Bytes that all adapters may take together.", low=0, unlimited=True
    )


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How the model is run."""

    threads: int | None = _setting(
        None, "CPU threads that compute; unset, the number of physical cores.", low=1, high=1024
    )
    mode: str = _setting(
        "process",
        "Where the engine runs: `process`, supervised, so that the server outlives it; `inline` on a thread.",
        choices=("process", "inline"),
    )
    parallel: int = _setting(16, "Sequences decoded together at most.", low=1, high=128)
    ctx_size: int | None = _setting(
        None,
        "Tokens of context, prompt and completion, that one request may use;"
        " unset, the model's own size up to 32768.",
        low=16,
        high=2**31 - 1,
    )
    kv_size: int | None = _setting(
        None,
        "Tokens that the KV cache holds for all requests together; unset, derived.",
        low=16,
        high=2**31 - 1,
    )
    step_tokens: int = _setting(512, "Prompt tokens evaluated in one engine step at most.", low=1, high=2048)
    stall_tokens: int = _setting(
        128, "The same while other requests decode: what a long prompt may delay them.", low=1, high=2048
    )
    retain_tokens: int = _setting(
        4096,
        "Tokens kept as prefixes of requests that have ended; every one makes decoding a little slower.",
        low=0,
    )
    adapter_turn_steps: int = _setting(
        4,
        "Engine steps in a row for requests with the same adapters while requests with others wait.",
        low=1,
        high=1024,
    )
    adapters_loaded: int = _setting(
        8, "Adapters kept in memory; the least recently used one beyond that is dropped.", low=1
    )
    speculation: bool = _setting(
        False,
        "Draft tokens by looking up what followed before; answers are the same, repetitive ones come faster.",
    )
    speculation_tokens: int = _setting(8, "Tokens drafted at once for one request at most.", low=1, high=32)
    host_cache_mib: int = _setting(
        0,
        "MiB of memory that keep prefixes beyond retain_tokens, to be copied back when they are needed.",
        low=0,
    )
    exact: str = _setting(
        "auto",
        "Which requests are computed exactly: `auto` those with a seed and those that need it.",
        choices=("auto", "always", "never"),
    )
    max_queue: int = _setting(256, "Requests that may wait for a free sequence at most.", low=0)
    completion_cache: int = _setting(
        0, "Finished greedy or seeded generations kept to be given again; 0 computes each anew.", low=0
    )
    openmp_wait_policy: str = _setting(
        "passive",
        "How idle compute threads wait: `active` spins, `passive` sleeps.",
        choices=("active", "passive"),
    )
    checks_books: bool = _setting(
        False, "Compare the KV book-keeping with the model's cache whenever the engine is idle."
    )
    hang_timeout_s: float | None = _setting(
        180.0,
        "Seconds of silence after which a working engine process is replaced; longer than any step takes.",
        above=0,
        unlimited=True,
    )
    request_timeout_s: float | None = _setting(
        None, "Seconds from arrival after which a request is ended; unset, never.", above=0
    )


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Sampling of requests that leave a parameter out. Unset, the model's own generation settings
    decide where it carries them, else kiln's defaults."""

    temperature: float | None = _setting(None, "Sampling temperature; 0 always takes the best.", low=0)
    top_p: float | None = _setting(None, "Smallest set of tokens with this probability mass.", low=0, high=1)
    top_k: int | None = _setting(None, "Number of best tokens kept; 0 keeps all.", low=0)
    min_p: float | None = _setting(
        None, "Least probability kept, as a share of the best token's.", low=0, high=1
    )
    presence_penalty: float | None = _setting(
        None, "Taken off the logits of tokens that were generated before.", low=-2, high=2
    )
    frequency_penalty: float | None = _setting(
        None, "Taken off the logits of generated tokens, once for each occurrence.", low=-2, high=2
    )
    repetition_penalty: float | None = _setting(
        None, "Divides the positive logits of tokens seen in prompt or completion; 1 is off.", above=0
    )
    max_tokens: int | None = _setting(None, "Completion tokens of a request at most.", low=0)


@dataclass(frozen=True, slots=True)
class OpenaiSettings:
    """The OpenAI-compatible profile under `/v1/openai`."""

    content_filter: str | None = _setting(
        None,
        "Function that visible answers must pass, `module:function`; docs/openai.md has its contract.",
        high=256,
    )
    price_prompt: float | None = _setting(
        None, "Dollars a million prompt tokens; with price_completion it makes `estimated_cost`.", low=0
    )
    price_cached_prompt: float | None = _setting(
        None, "The same for prompt tokens from the prefix cache; unset, price_prompt.", low=0
    )
    price_completion: float | None = _setting(None, "Dollars a million completion tokens.", low=0)

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

    max_rounds: int = _setting(
        8, "Rounds of generation in one exchange; in the last one the server offers no tools.", low=2, high=64
    )


@dataclass(frozen=True, slots=True)
class EmbeddingSettings:
    """The model behind `POST /v1/openai/embeddings`."""

    model_path: str | None = _setting(
        None, "A .gguf file, or a hub reference as in model.path; unset, there are no embeddings."
    )
    pooling: str = _setting(
        "auto",
        "How the vectors of tokens become one: `auto` as the file says, the mean where it says nothing.",
        choices=("auto", "mean", "cls", "last"),
    )


@dataclass(frozen=True, slots=True)
class ToolsSettings:
    """Which tools the server runs for a model, and within which bounds."""

    allow: tuple[str, ...] = _setting(
        ("category:pure",),
        "Tools that may run: names with `*` for any characters, or `category:` and a category.",
    )
    deny: tuple[str, ...] = _setting((), "Tools that may not run, written as in allow, which it outweighs.")
    timeout_s: float = _setting(30.0, "Seconds that one tool call may take.", above=0, high=3600)
    max_output_chars: int = _setting(
        16_384, "Characters of a tool's output that the model gets to read.", low=64, high=1_048_576
    )
    search_provider: str | None = _setting(
        None, "Where web_search looks things up; unset, there is no such tool.", choices=("searxng", "ddgs")
    )
    searxng_url: str | None = _setting(
        None, "Base URL of the SearXNG instance that web_search asks.", high=2048
    )
    search_results: int = _setting(5, "Results of a web search at most.", low=1, high=20)
    fetch_max_bytes: int = _setting(
        2_097_152, "Bytes of a page that fetch_page reads at most, unpacked.", low=1024, high=2**30
    )
    fetch_max_redirects: int = _setting(5, "Redirects that fetch_page follows at most.", low=0, high=20)

    def __post_init__(self) -> None:
        for key in ("allow", "deny"):
            for entry in getattr(self, key):
                category = entry.removeprefix("category:")
                if category != entry and category not in TOOL_CATEGORIES:
                    known = ", ".join(f"category:{name}" for name in TOOL_CATEGORIES)
                    raise BadValue(f"tools.{key} names {entry}: the categories are {known}")
        if (self.search_provider == "searxng") != (self.searxng_url is not None):
            raise BadValue("tools.searxng_url must be set if tools.search_provider is searxng, and only then")
        if self.searxng_url is not None and not _is_web_address(self.searxng_url):
            raise BadValue("tools.searxng_url must be a http or https URL")


@dataclass(frozen=True, slots=True)
class FilesSettings:
    """Bounds of the files that come with messages."""

    max_files: int = _setting(16, "Files that one request may have.", low=0, high=1024)
    max_bytes: int = _setting(8_388_608, "Bytes that one file may have.", low=1, high=2**31 - 1)
    max_chars: int = _setting(400_000, "Characters of text that one file may hold.", low=1, high=2**26)
    max_pages: int = _setting(200, "Pages that one PDF may have.", low=1, high=100_000)
    timeout_s: float = _setting(
        20.0, "Seconds that reading the PDFs of one request may take.", above=0, high=3600
    )
    max_memory_bytes: int = _setting(
        1_073_741_824, "Bytes of memory that reading one PDF may take.", low=268_435_456
    )
    parallel: int = _setting(2, "PDFs read at the same time at most.", low=1, high=64)


@dataclass(frozen=True, slots=True)
class McpServerSettings:
    """One server of the Model Context Protocol: a program to start, or an address to reach."""

    command: str | None = _setting(None, "Program that is started and spoken to over its standard streams.")
    args: tuple[str, ...] = _setting((), "Arguments of the program.")
    env: Mapping[str, str] | None = _setting(
        None, "Environment variables of the program, a table of texts; never shown.", secret=True
    )
    cwd: str | None = _setting(None, "Working directory of the program; unset, that of kiln.")
    url: str | None = _setting(None, "Address of a server that speaks streamable HTTP.", high=2048)
    headers: Mapping[str, str] | None = _setting(
        None, "Headers sent to that address, a table of texts; never shown.", secret=True
    )
    timeout_s: float = _setting(
        30.0, "Seconds that the server may take to start and to list its tools.", above=0, high=3600
    )

    def __post_init__(self) -> None:
        if (self.command is None) == (self.url is None):
            raise BadValue("either command or url must be set, and not both")
        if self.command is None and (self.args or self.env is not None or self.cwd is not None):
            raise BadValue("args, env and cwd go with command, not with url")
        if self.url is None and self.headers is not None:
            raise BadValue("headers goes with url, not with command")
        if self.url is not None and not _is_web_address(self.url):
            raise BadValue("url must be a http or https URL")


@dataclass(frozen=True, slots=True)
class CatalogModelSettings:
    """A model that is loaded when a request names it. What is unset is as for the default model."""

    path: str | None = _setting(None, "A .gguf file, or a hub reference `owner/name[:quant-or-file]`.")
    ctx_size: int | None = _setting(
        None, "Tokens of context that one request may use; unset, the model's own.", low=16, high=2**31 - 1
    )
    kv_size: int | None = _setting(
        None, "Tokens that its KV cache holds; unset, derived.", low=16, high=2**31 - 1
    )
    parallel: int | None = _setting(None, "Sequences decoded together at most.", low=1, high=128)
    reasoning_open: str | None = _setting(None, "Tag that opens reasoning. Goes with reasoning_close.")
    reasoning_close: str | None = _setting(None, "Tag that closes reasoning. Goes with reasoning_open.")
    chat_template_file: str | None = _setting(
        None, "File with a Jinja chat template to use instead of the model's own."
    )
    temperature: float | None = _setting(None, "Sampling temperature; 0 always takes the best.", low=0)
    top_p: float | None = _setting(None, "Smallest set of tokens with this probability mass.", low=0, high=1)
    top_k: int | None = _setting(None, "Number of best tokens kept; 0 keeps all.", low=0)
    min_p: float | None = _setting(
        None, "Least probability kept, as a share of the best token's.", low=0, high=1
    )
    presence_penalty: float | None = _setting(
        None, "Taken off the logits of tokens generated before.", low=-2, high=2
    )
    frequency_penalty: float | None = _setting(
        None, "Taken off the logits of generated tokens, once for each occurrence.", low=-2, high=2
    )
    repetition_penalty: float | None = _setting(
        None, "Divides the positive logits of tokens seen in prompt or completion; 1 is off.", above=0
    )
    max_tokens: int | None = _setting(None, "Completion tokens of a request at most.", low=0)

    def __post_init__(self) -> None:
        if self.path is None:
            raise BadValue("path must be set")
        if (self.reasoning_open is None) != (self.reasoning_close is None):
            raise BadValue("reasoning_open and reasoning_close must be set both or neither")


def _is_web_address(text: str) -> bool:
    return re.fullmatch(r"https?://[^/\s?#]+([/?][^\s#]*)?", text) is not None


@dataclass(frozen=True, slots=True)
class SkillsSettings:
    """Skills that requests may use."""

    dir: str | None = _setting(
        None, "Folder of skills, each a folder with a SKILL.md; read again when they change."
    )


@dataclass(frozen=True, slots=True)
class AuthSettings:
    """Who may use the server."""

    anonymous: bool | None = _setting(
        None,
        "Whether requests without an API key are served; unset, only if server.host is a loopback address.",
    )
    session_hours: float = _setting(
        12.0, "Hours until a browser's session ends by itself.", above=0, high=8760
    )


@dataclass(frozen=True, slots=True)
class AgentsSettings:
    """Agents that requests may adopt."""

    dir: str | None = _setting(
        None, "Folder of agents, each a file `<name>.toml`; read again when they change."
    )


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Where API keys and memory are kept."""

    path: str | None = _setting(
        None, "SQLite file of keys and memory; unset, kiln/kiln.db in the user's state directory.", high=4096
    )
    memory: bool = _setting(
        True, "Whether requests may use memory; where not, those that name one are answered without."
    )


@dataclass(frozen=True, slots=True)
class MemoryStoreSettings:
    """The policy of a memory store: what is recalled, kept and learned in the memories under it."""

    recall_depth: int = _setting(8, "Facts that an exchange gets to see at most.", low=1, high=64)
    capacity: int = _setting(
        1000, "Facts of one memory; what exceeds them is forgotten.", low=1, high=100_000
    )
    eviction: str = _setting(
        "lru",
        "Which facts are forgotten first: those used longest ago, the oldest, or the least often used.",
        choices=("lru", "oldest", "least_used"),
    )
    half_life_days: float | None = _setting(
        None, "Days without use after which a fact counts half in the recall; unset, it never fades.", above=0
    )
    extraction: bool = _setting(True, "Whether facts are extracted from exchanges by themselves.")
    dedup_threshold: float = _setting(
        0.9,
        "From which similarity on a new fact replaces an old one; 1 only if they are equal.",
        above=0,
        high=1,
    )


@dataclass(frozen=True)
class Settings:
    """All settings, resolved. `sources` says for each key, as `server.port`, which of SOURCES set it."""

    server: ServerSettings = field(default_factory=ServerSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    openai: OpenaiSettings = field(default_factory=OpenaiSettings)
    embedding: EmbeddingSettings = field(default_factory=EmbeddingSettings)
    native: NativeSettings = field(default_factory=NativeSettings)
    tools: ToolsSettings = field(default_factory=ToolsSettings)
    skills: SkillsSettings = field(default_factory=SkillsSettings)
    agents: AgentsSettings = field(default_factory=AgentsSettings)
    files: FilesSettings = field(default_factory=FilesSettings)
    mcp: Mapping[str, McpServerSettings] = field(default_factory=lambda: MappingProxyType({}))
    models: Mapping[str, CatalogModelSettings] = field(default_factory=lambda: MappingProxyType({}))
    memory: Mapping[str, MemoryStoreSettings] = field(default_factory=lambda: MappingProxyType({}))
    auth: AuthSettings = field(default_factory=AuthSettings)
    store: StoreSettings = field(default_factory=StoreSettings)
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(_default_sources()))

    @staticmethod
    def default() -> Settings:
        return Settings()

    @staticmethod
    def build(
        values: Mapping[str, Any],
        sources: Mapping[str, str],
        tables: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Settings:
        """Settings with `values` (checked ones, by key) over the defaults, and where each came from.

        `tables` has the named tables by family and name.

        Raises BadValue where values that are fine alone do not go together.
        """
        parts: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        for name, value in values.items():
            section, key = name.split(".")
            parts[section][key] = value
        model = ModelSettings(**parts["model"])
        if (model.reasoning_open is None) != (model.reasoning_close is None):
            raise BadValue("model.reasoning_open and model.reasoning_close must be set both or neither")
        return Settings(
            ServerSettings(**parts["server"]),
            model,
            EngineSettings(**parts["engine"]),
            SamplingSettings(**parts["sampling"]),
            OpenaiSettings(**parts["openai"]),
            EmbeddingSettings(**parts["embedding"]),
            NativeSettings(**parts["native"]),
            ToolsSettings(**parts["tools"]),
            SkillsSettings(**parts["skills"]),
            AgentsSettings(**parts["agents"]),
            auth=AuthSettings(**parts["auth"]),
            store=StoreSettings(**parts["store"]),
            files=FilesSettings(**parts["files"]),
            sources=MappingProxyType(_default_sources() | dict(sources)),
            **{family: MappingProxyType(dict(named)) for family, named in (tables or {}).items()},
        )

    def for_model(self, name: str) -> Settings:
        """The settings that a model of the catalog, `[models.<name>]`, is served with."""
        table = self.models[name]
        model = ModelSettings(
            path=table.path,
            reasoning_open=table.reasoning_open,
            reasoning_close=table.reasoning_close,
            seed_open_tag=self.model.seed_open_tag,
            chat_template_file=table.chat_template_file,
        )
        parallel = self.engine.parallel if table.parallel is None else table.parallel
        engine = dataclasses.replace(
            self.engine, ctx_size=table.ctx_size, kv_size=table.kv_size, parallel=parallel
        )
        # What the table leaves open is the model's own affair, not that of the default model.
        sampling = SamplingSettings(**{key: getattr(table, key) for key in SamplingSettings.__slots__})
        server = dataclasses.replace(self.server, served_model_id=name)
        return dataclasses.replace(self, server=server, model=model, engine=engine, sampling=sampling)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        host = self.server.host
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host.lower() == "localhost"

    @property
    def serves_anonymous(self) -> bool:
        """Whether callers need no API key."""
        return self.is_local if self.auth.anonymous is None else self.auth.anonymous

    def get(self, name: str) -> object:
        """The value of a key such as `server.port`."""
        section, key = name.split(".")
        value: object = getattr(getattr(self, section), key)
        return value


SECTIONS: Mapping[str, type] = MappingProxyType(
    {
        "server": ServerSettings,
        "model": ModelSettings,
        "engine": EngineSettings,
        "sampling": SamplingSettings,
        "openai": OpenaiSettings,
        "embedding": EmbeddingSettings,
        "native": NativeSettings,
        "tools": ToolsSettings,
        "skills": SkillsSettings,
        "agents": AgentsSettings,
        "auth": AuthSettings,
        "store": StoreSettings,
        "files": FilesSettings,
    }
)


@dataclass(frozen=True, slots=True)
class TableFamily:
    """Tables `[family.<name>]`: the class of one, and what its name may be, as a pattern and in words."""

    cls: type
    name_pattern: str
    name_words: str


TABLES: Mapping[str, TableFamily] = MappingProxyType(
    {
        "mcp": TableFamily(
            McpServerSettings,
            r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,30}[a-zA-Z0-9])?",
            "at most 32 letters, digits and dashes, with no dash at either end",
        ),
        "models": TableFamily(
            CatalogModelSettings,
            r"[a-zA-Z0-9][a-zA-Z0-9._:/-]{0,255}",
            "letters, digits and . _ : / - (in quotes where TOML asks for them), a letter or digit first",
        ),
        "memory": TableFamily(
            MemoryStoreSettings, r"[a-zA-Z0-9_-]{1,64}", "at most 64 letters, digits, dashes and underscores"
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Declaration:
    """One setting as declared above. None is allowed if `optional`.

    `kind` is bool, int, float, str, tuple (of texts) or Mapping (of texts, in named tables only).
    """

    section: str
    key: str
    kind: type
    optional: bool
    default: Any
    doc: str
    low: float | None
    high: float | None
    above: float | None
    choices: tuple[str, ...]
    unlimited: bool
    secret: bool

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}"

    @property
    def environment_name(self) -> str:
        return f"KILN_{self.section}_{self.key}".upper()

    @property
    def allowed(self) -> str:
        """What a value may be, in words, as error messages and the documentation say it."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.kind is bool:
            return "true or false"
        if self.kind is str:
            most = "" if self.high is None else f" of at most {self.high:g} characters"
            return f"a text{most}, not empty and without control characters"
        if self.kind is tuple:
            return "a list of texts, none empty or with control characters"
        if self.kind is Mapping:
            return "a table of texts"
        words = "a whole number" if self.kind is int else "a number"
        low, high = (int(n) if n is not None and self.kind is int else n for n in (self.low, self.high))
        if low is not None and high is not None:
            words += f" from {low} to {high}"
        elif low is not None:
            words += f", {low} or more"
        elif self.above is not None:
            words += f" above {self.above:g}" + ("" if high is None else f", {high} at most")
        return words + (", or unlimited" if self.unlimited else "")

    def accept(self, value: object) -> Any:
        """The value to store, or BadValue. Nothing is converted but an int where a float is asked
        and the text `unlimited`, in any letter case, of a setting that has it."""
        if self.unlimited and isinstance(value, str) and value.lower() == "unlimited":
            return None
        if self.kind is float and type(value) is int and abs(value) <= MAX_INT:
            value = float(value)
        if self.kind is tuple:
            return self._accept_texts(value)
        if self.kind is Mapping:
            return self._accept_pairs(value)
        if type(value) is not self.kind or not self._in_range(value):
            raise BadValue(self.allowed)
        return value

    def _accept_texts(self, value: object) -> tuple[str, ...]:
        if not isinstance(value, list | tuple):
            raise BadValue(self.allowed)
        if not all(isinstance(entry, str) and _is_plain(entry, None) for entry in value):
            raise BadValue(self.allowed)
        return tuple(value)

    def _accept_pairs(self, value: object) -> Mapping[str, str]:
        if not isinstance(value, dict):
            raise BadValue(self.allowed)
        for name, text in value.items():
            is_fine = _is_plain(name, None) and isinstance(text, str) and (not text or _is_plain(text, None))
            if not is_fine:
                raise BadValue(self.allowed)
        return MappingProxyType(dict(value))

    def _in_range(self, value: Any) -> bool:
        if self.kind is str:
            return value in self.choices if self.choices else _is_plain(value, self.high)
        if self.kind is bool:
            return True
        # A NaN fails every comparison, so it is asked for by name.
        if not math.isfinite(value) or (self.kind is int and abs(value) > MAX_INT):
            return False
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
        )


def _is_plain(text: str, most: float | None) -> bool:
    # A lone surrogate is how the system hands over bytes that are not UTF-8.
    has_control = any(ord(c) < 0x20 or ord(c) == 0x7F or 0xD800 <= ord(c) < 0xE000 for c in text)
    return text.strip() != "" and not has_control and (most is None or len(text) <= most)


@cache
def declarations() -> Mapping[str, Declaration]:
    """Every setting by its key (`server.port`), in the order of declaration."""
    found = {d.name: d for section, cls in SECTIONS.items() for d in _declared(section, cls)}
    return MappingProxyType(found)


@cache
def table_declarations(family: str) -> Mapping[str, Declaration]:
    """Every setting of one table of a family, by its bare key (`command`), in the order of declaration."""
    return MappingProxyType({d.key: d for d in _declared(family, TABLES[family].cls)})


def _declared(section: str, cls: Any) -> list[Declaration]:
    hints = get_type_hints(cls)
    found = []
    for f in dataclasses.fields(cls):
        hint = hints[f.name]
        kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        kind = get_origin(kinds[0]) or kinds[0]
        found.append(Declaration(section, f.name, kind, type(None) in kinds, f.default, **f.metadata))
    return found


def _default_sources() -> dict[str, str]:
    return dict.fromkeys(declarations(), "default")


def settings_as_json(settings: Settings) -> dict[str, dict[str, dict[str, object]]]:
    """`{"server": {"port": {"value": 8420, "source": "default"}, …}, …}`; unset and unlimited are null."""
    shown: dict[str, dict[str, dict[str, object]]] = {section: {} for section in SECTIONS}
    for name, declaration in declarations().items():
        value = settings.get(name)
        plain = list(value) if isinstance(value, tuple) else value
        entry = {"value": plain, "source": settings.sources[name]}
        shown[declaration.section][declaration.key] = entry
    return shown


def tables_as_json(settings: Settings) -> dict[str, dict[str, dict[str, object]]]:
    """`{"mcp": {"files": {"command": "…", "env": "set, not shown", …}}}`: what the file has, by family and
    name, for those who may read the file. Families without a table are left out."""
    shown: dict[str, dict[str, dict[str, object]]] = {}
    for family in TABLES:
        for name, table in getattr(settings, family).items():
            shown.setdefault(family, {})[name] = {
                key: "set, not shown" if d.secret else getattr(table, key)
                for key, d in table_declarations(family).items()
                if getattr(table, key) != d.default
            }
    return shown


def show_value(value: object) -> str:
    """A value as error messages quote it: JSON where it has a form there, else as Python writes it."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=True)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 200 else text[:197] + "…"
