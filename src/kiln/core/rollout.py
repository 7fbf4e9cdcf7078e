"""What makes a rollout reproducible and attributable, as values (seed 000, RolloutProvenanceV1)."""

from __future__ import annotations

from dataclasses import dataclass

from kiln.core.budgets import Budget
from kiln.core.messages import Conversation
from kiln.core.sampling import SamplingParams
from kiln.core.tokens import TokenEvent


@dataclass(frozen=True, slots=True)
class AdapterIdentity:
    """An adapter or a composition of adapters: what it is called, and the hash of its content."""

    name: str
    content_sha256: str


@dataclass(frozen=True, slots=True)
class PolicyIdentity:
    """Content hashes (`sha256:` and lower-case hex) of everything that shapes the behaviour policy.

    `adapter` is None for the base model.
    """

    served_model_id: str
    base_model: str
    inference_config: str
    vocabulary: str
    tokenizer_config: str
    chat_template: str
    model_config: str
    backend: str
    adapter: AdapterIdentity | None = None

    @property
    def fingerprint(self) -> tuple[str, ...]:
        """What prompt scores depend on."""
        return (self.base_model, self.inference_config, self.vocabulary, self.tokenizer_config, self.backend)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One generated completion with its prompt, its tokens in order, and how they were chosen."""

    conversation: Conversation
    prompt_ids: tuple[int, ...]
    tokens: tuple[TokenEvent, ...]
    sampling: SamplingParams
    max_tokens: int
    stop: tuple[str, ...]
    seed: int
    budget: Budget
    budget_applied: bool
    close_ids: tuple[int, ...]
    policy: PolicyIdentity
