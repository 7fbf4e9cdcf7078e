"""The model being served, as the use cases see it: tokenizer, template, thinking tags, defaults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from kiln.adapters.registry import AdapterRegistry, no_adapters
from kiln.chat.structured.check import GrammarCheck
from kiln.core.rollout import PolicyIdentity
from kiln.core.sampling import SamplingOverrides
from kiln.core.tokens import Tokenizer
from kiln.text.reasoning import ReasoningTags, TemplateThinking
from kiln.text.template import ChatTemplate
from kiln.text.tool_calls import ToolFormat
from kiln.thinking.gate import CloseSequence

DEFAULT_MAX_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Everything about the model that a request needs.

    `hidden_ids` are tokens never shown as text, `longest_piece` is the most bytes that a token has.
    `policy` hashes the weights the first time it is
    called: call it on a worker thread. `grammars` checks constrained requests before they are submitted.
    """

    id: str
    created: int
    tokenizer: Tokenizer
    bos_id: int | None
    template: ChatTemplate
    context_length: int
    tags: ReasoningTags | None
    close: CloseSequence | None
    template_thinking: TemplateThinking
    seeds_open_tag: bool
    tool_format: ToolFormat | None
    hidden_ids: frozenset[int]
    sampling_defaults: SamplingOverrides
    max_tokens_default: int
    budget_tokens_default: int | None
    budget_ms_default: int | None
    thinking_default: bool | None
    policy: Callable[[], PolicyIdentity]
    longest_piece: int
    grammars: GrammarCheck
    exact: Literal["auto", "always", "never"] = "auto"
    adapters: AdapterRegistry = field(default_factory=no_adapters)

    @property
    def can_think(self) -> bool:
        """Whether there is a reasoning block for it at all; without, budgets have nothing to limit."""
        return self.tags is not None

    @property
    def thinks_by_default(self) -> bool:
        if self.thinking_default is not None:
            return self.thinking_default
        return self.template_thinking.default_enabled
