"""What the routes share."""

from __future__ import annotations

from dataclasses import dataclass, field

from kiln.chat.embedding import EmbeddingService
from kiln.chat.filtering import ContentFilter
from kiln.chat.models.catalog import ModelCatalog
from kiln.chat.remembering.memory import Memory
from kiln.chat.service import ChatService
from kiln.chat.telemetry.stats import Statistics
from kiln.core.settings import FilesSettings, Settings
from kiln.dialects.kiln_reply import ReplyOptions
from kiln.http.guard import AccessPolicy
from kiln.http.metrics import Metrics
from kiln.native.exchange import Means
from kiln.native.live import LiveExchanges
from kiln.skills.agents import AgentLibrary
from kiln.skills.library import SkillLibrary
from kiln.text.files import FileReader
from kiln.tools.toolbox import Toolbox
from kiln.wire.kiln import ChatCompletionRequest, ConfigHashes


@dataclass(frozen=True, slots=True)
class ServerState:
    """Everything a route may need. `live` holds the native exchanges that run under a name."""

    settings: Settings
    catalog: ModelCatalog
    metrics: Metrics
    statistics: Statistics
    access: AccessPolicy
    memory: Memory
    skills: SkillLibrary = field(default_factory=SkillLibrary)
    agents: AgentLibrary = field(default_factory=AgentLibrary)
    toolbox: Toolbox = field(default_factory=Toolbox)
    files: FileReader = field(default_factory=lambda: FileReader(FilesSettings()))
    content_filter: ContentFilter | None = None
    embeddings: EmbeddingService = field(default_factory=lambda: EmbeddingService(None))
    live: LiveExchanges = field(default_factory=LiveExchanges)

    def resolved(self) -> dict[str, object]:
        """The resolved part of `/v1/config`: the default model's, and what else the catalog holds."""
        return {**self.catalog.default.facts, "models": self.catalog.states()}

    @property
    def service(self) -> ChatService:
        """The default model's service."""
        return self.catalog.default.service

    async def drain(self) -> None:
        """Refuse new exchanges and let running ones finish within the grace; nothing is learned any more."""
        await self.memory.end_learning()
        await self.catalog.drain(self.settings.server.shutdown_grace_s)

    def efforts(self) -> dict[str, int | None]:
        """The thinking tokens of each reasoning effort; None is unlimited."""
        server = self.settings.server
        return {
            "low": server.reasoning_low_tokens,
            "medium": server.reasoning_medium_tokens,
            "high": server.reasoning_high_tokens,
        }

    def means(self) -> Means:
        """What native exchanges work with."""
        return Means(
            attach=self.catalog.lease,
            toolbox=self.toolbox,
            memory=self.memory,
            observe_call=self.metrics.tool_called,
            max_rounds=self.settings.native.max_rounds,
            timeout_s=self.settings.engine.request_timeout_s,
        )

    def reply_options(self, request: ChatCompletionRequest, service: ChatService) -> ReplyOptions:
        """A request's wishes over the server's defaults. Call it on a worker thread: it may hash."""
        server = self.settings.server
        fold = request.fold_reasoning_into_content
        hashes = request.include_config_hashes
        wanted = server.include_config_hashes if hashes is None else hashes
        options = request.stream_options
        performance = request.include_performance
        return ReplyOptions(
            stream=request.stream,
            include_usage=options is not None and options.include_usage,
            fold_reasoning=server.fold_reasoning_into_content if fold is None else fold,
            config_hashes=_hashes(service) if wanted else None,
            performance=server.include_performance if performance is None else performance,
        )


def _hashes(service: ChatService) -> ConfigHashes:
    policy = service.model.policy()
    return ConfigHashes(
        tokenizer_config_hash=policy.tokenizer_config,
        chat_template_hash=policy.chat_template,
        model_config_hash=policy.model_config,
        effective_config_hash=policy.inference_config,
    )
