"""What the routes share."""

from __future__ import annotations

from dataclasses import dataclass

from kiln.chat.service import ChatService
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
    config_hashes: ConfigHashes
    model_facts: dict[str, object]

    def reply_options(self, request: ChatCompletionRequest) -> ReplyOptions:
        """A request's wishes over the server's defaults."""
        server = self.settings.server
        fold = request.fold_reasoning_into_content
        hashes = request.include_config_hashes
        options = request.stream_options
        return ReplyOptions(
            stream=request.stream,
            include_usage=options is not None and options.include_usage,
            fold_reasoning=server.fold_reasoning_into_content if fold is None else fold,
            config_hashes=self.config_hashes
            if (server.include_config_hashes if hashes is None else hashes)
            else None,
        )
