"""One chat request as the use cases understand it, whatever dialect it came in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from msgspec import UNSET, UnsetType

from kiln.core.messages import Conversation
from kiln.core.sampling import SamplingOverrides


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The shape the visible answer must have: any JSON object, or JSON of a schema.

    `param` is the request field it came from. Without `strict` the schema is still enforced, but a
    schema that leaves objects open is not closed.
    """

    kind: Literal["json_object", "json_schema"]
    schema: dict[str, Any] | bool | None = None
    strict: bool = False
    param: str = "response_format"


@dataclass(frozen=True, slots=True)
class ToolPolicy:
    """How the tools of a conversation may be called, where a dialect enforces it.

    `auto` leaves it to the model, `required` asks for at least one call, `named` for one of `name`.
    Without `parallel` there is one call at most. With `checked` a call that does not fit the schema of
    its tool is malformed.
    """

    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str | None = None
    parallel: bool = True
    checked: bool = True


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """A prompt without a conversation: a text, whose control tokens count as such, or token ids.

    With `add_special` a text gets the tokens that the model's tokenizer puts around one.
    """

    content: str | tuple[int, ...]
    add_special: bool = True


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """What to answer and how.

    Budget overrides have three states: UNSET = inherit, None = unlimited, an integer = that limit.
    `max_tokens` None = the configured default. `max_tokens_field` is the
    request field it came from. `seed` None = the runtime chooses. With `provenance`
    the completion is computed exactly and comes with its rollout; a `measured` one reports its latency.
    Choice i draws from (`seed`, i), with `seed_per_choice` from (`seed` + i, 0). `logit_bias` maps token
    ids or texts to what is added to their logits. `top_logprobs` None = no log-probabilities. `adapters`
    are names and scales, from the request field `adapters_field`; UNSET = the server's default, empty = the
    base model. `tool_policy` None = tools are offered and their calls parsed, nothing more. A raw `prompt`
    stands in for the conversation, and its answer is all content, as generated. `request_id` is the caller's
    name for the exchange.
    """

    conversation: Conversation
    model: str | None = None
    sampling: SamplingOverrides = SamplingOverrides()
    sampling_preset: str | None = None
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    ignore_eos: bool = False
    budget_tokens: int | None | UnsetType = UNSET
    budget_ms: int | None | UnsetType = UNSET
    stop: tuple[str, ...] = ()
    seed: int | None = None
    n: int = 1
    provenance: bool = False
    measured: bool = False
    seed_per_choice: bool = False
    logit_bias: tuple[tuple[int | str, float], ...] = ()
    top_logprobs: int | None = None
    answer_format: AnswerFormat | None = None
    tool_policy: ToolPolicy | None = None
    adapters: tuple[tuple[str, float], ...] | UnsetType = UNSET
    adapters_field: str = "adapter"
    priority: bool = False
    narrated: bool = False
    prompt: RawPrompt | None = None
    request_id: str | None = None
