"""Every setting of the server, declared once.

The sections in `serving.py` and `services.py` are the single source: the keys of kiln.toml, the names of
environment variables, the rows of `kiln config` and the tables of docs/configuration.md derive from them.
`declare.py` knows what a valid value is; where values are read from is the command line's affair.

A section has fixed keys. A family of tables with names of the user's choosing, as `[mcp.files]`, is a
dataclass in TABLES: its fields are declared with `setting` as those of a section are, its
`__post_init__` raises BadValue where values do not go together or one is missing, and `Settings` has
a field of the family's name, a mapping from the free names to instances. Tables come from the file only.
To add a family: write the dataclass, add it to TABLES with the rule for its names, add the field to
`Settings`, and a table of its keys to docs/configuration.md. A setting that is `secret` is never shown.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any

from kiln.core.settings.declare import MAX_INT, BadValue, Declaration, declared_in, show_value
from kiln.core.settings.services import (
    TOOL_CATEGORIES,
    AgentsSettings,
    AuthSettings,
    EmbeddingSettings,
    FilesSettings,
    McpServerSettings,
    MemoryStoreSettings,
    NativeSettings,
    OpenaiSettings,
    SkillsSettings,
    StoreSettings,
    ToolsSettings,
)
from kiln.core.settings.serving import (
    CatalogModelSettings,
    EngineSettings,
    ModelSettings,
    SamplingSettings,
    ServerSettings,
)

__all__ = [
    "AgentsSettings",
    "AuthSettings",
    "BadValue",
    "CatalogModelSettings",
    "Declaration",
    "EmbeddingSettings",
    "EngineSettings",
    "FilesSettings",
    "MAX_INT",
    "McpServerSettings",
    "MemoryStoreSettings",
    "ModelSettings",
    "NativeSettings",
    "OpenaiSettings",
    "SECTIONS",
    "SOURCES",
    "SamplingSettings",
    "ServerSettings",
    "Settings",
    "SkillsSettings",
    "StoreSettings",
    "TABLES",
    "TOOL_CATEGORIES",
    "TableFamily",
    "ToolsSettings",
    "declarations",
    "settings_as_json",
    "show_value",
    "table_declarations",
    "tables_as_json",
]

SOURCES = ("default", "file", "environment", "flag")


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


@cache
def declarations() -> Mapping[str, Declaration]:
    """Every setting by its key (`server.port`), in the order of declaration."""
    found = {d.name: d for section, cls in SECTIONS.items() for d in declared_in(section, cls)}
    return MappingProxyType(found)


@cache
def table_declarations(family: str) -> Mapping[str, Declaration]:
    """Every setting of one table of a family, by its bare key (`command`), in the order of declaration."""
    return MappingProxyType({d.key: d for d in declared_in(family, TABLES[family].cls)})


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
