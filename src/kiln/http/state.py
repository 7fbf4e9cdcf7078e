"""What the routes share."""

from __future__ import annotations

from dataclasses import dataclass

from kiln.chat.service import ChatService
from kiln.chat.stats import Statistics
from kiln.core.settings import Settings
from kiln.dialects.kiln import ReplyOptions
from kiln.http.metrics import Metrics
from kiln.wire.kiln import ChatCompletionRequest, ConfigHashes


@dataclass(frozen=True, slots=True)
class ServerState:
    """Everything a route may need. `model_facts` is the resolved part of `/v1/config`."""

    settings: Settings
    service: ChatService
    metrics: Metrics
    statistics: Statistics
    model_facts: dict[str, object]

    async def service_for(self, model: str | None) -> ChatService:
        """The service of a requested model. None is the default model; preparing refuses unknown ones."""
        return self.service

    def reply_options(self, request: ChatCompletionRequest) -> ReplyOptions:
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
            config_hashes=self._hashes() if wanted else None,
            performance=server.include_performance if performance is None else performance,
        )

    def _hashes(self) -> ConfigHashes:
        policy = self.service.model.policy()
        return ConfigHashes(
            tokenizer_config_hash=policy.tokenizer_config,
            chat_template_hash=policy.chat_template,
            model_config_hash=policy.model_config,
            effective_config_hash=policy.inference_config,
        )
