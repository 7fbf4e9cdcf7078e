"""Puts the store, the access policy and memory together out of the settings."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from kiln.access.book import KeyBook
from kiln.chat.embedding import Embedder
from kiln.chat.models.catalog import ModelCatalog
from kiln.chat.remembering.extraction import ModelExtractor
from kiln.chat.remembering.memory import Memory
from kiln.chat.remembering.vectors import MemoryVectors
from kiln.core.errors import ConfigError, StoreFailed
from kiln.core.settings import Settings
from kiln.http.guard import AccessPolicy
from kiln.store.database import Database
from kiln.store.keys import KeyStore
from kiln.store.memory import MemoryTables

log = logging.getLogger(__name__)


def store_path(settings: Settings) -> Path:
    """The store's file: `store.path`, else kiln/kiln.db in the user's state directory."""
    if settings.store.path is not None:
        return Path(settings.store.path)
    state = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    return Path(state) / "kiln" / "kiln.db"


def open_memory(settings: Settings, catalog: ModelCatalog, embedder: Embedder | None) -> Memory:
    """Memory as the settings want it; call it on the event loop. Its file is made by the first fact."""
    tables = None
    if settings.store.memory:
        vectors = None if embedder is None else MemoryVectors(embedder)
        tables = MemoryTables(Database(store_path(settings)), vectors)
    return Memory(tables, settings.memory, ModelExtractor(catalog))


class Access:
    """The access policy of a server that is being put together."""

    def __init__(self, settings: Settings) -> None:
        self.cors_origins = settings.server.cors_origins
        self.policy = AccessPolicy(
            KeyBook(KeyStore(Database(store_path(settings)))),
            open_to_all=settings.serves_anonymous,
            local=settings.is_local,
            # A star lets pages read; it lends no page the rights of who looks at it.
            trusted_origins=[origin for origin in self.cors_origins if origin != "*"],
        )

    async def open(self) -> None:
        """Read the keys. Raises ConfigError where the store cannot be used."""
        try:
            await self.policy.book.open()
        except StoreFailed as error:
            raise ConfigError(error.message, hint=error.hint) from None
        if not self.policy.open_to_all and not self.policy.book.has_keys:
            log.warning(
                "nobody can use this server yet: it asks for an API key and none exists;"
                " `kiln keys create NAME` makes one, at once in force"
            )
