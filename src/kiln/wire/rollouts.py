"""Rollout provenance of the Kiln contract (seed 000): which policy chose which token of a completion."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from kiln.wire.common import NonNegative, NonNegativeNumber, Positive, Sha256, Uint32, Uint64

IDENTITY_PATTERN = r"^[^\u0000-\u001f\u007f]+$"
MAX_IDENTITY_BYTES = 256

IdentityText = Annotated[str, Meta(min_length=1, max_length=256, pattern=IDENTITY_PATTERN)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class SampledActionTokenV1(
    Struct, kw_only=True, forbid_unknown_fields=True, tag_field="source", tag="sampled"
):
    """A generated token that the policy drew. `behavior_logprob` is a natural logarithm."""

    sequence_index: NonNegative
    token_id: Uint32
    behavior_logprob: Annotated[float, Meta(le=1e-6)]


class ForcedActionTokenV1(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="source", tag="forced"):
    """A generated token that kiln put in: part of a forced close."""

    sequence_index: NonNegative
    token_id: Uint32
    behavior_logprob: None


RolloutActionTokenV1 = SampledActionTokenV1 | ForcedActionTokenV1


class RolloutAdapterIdentityV1(Struct, kw_only=True, forbid_unknown_fields=True):
    name: IdentityText
    content_sha256: Sha256


class RolloutBehaviorPolicyIdentityV1(Struct, kw_only=True, forbid_unknown_fields=True):
    served_model_id: IdentityText
    base_model_sha256: Sha256
    adapter: RolloutAdapterIdentityV1 | UnsetType = UNSET
    inference_config_sha256: Sha256
    implementation: IdentityText


class RolloutTokenizerIdentityV1(Struct, kw_only=True, forbid_unknown_fields=True):
    vocab_sha256: Sha256
    config_sha256: Sha256
    chat_template_sha256: Sha256


class RolloutChatTemplateInvocationV1(Struct, kw_only=True, forbid_unknown_fields=True):
    """What besides the messages shaped the prompt; at most 1,048,576 bytes as JSON."""

    tools: Annotated[list[Any], Meta(max_length=256)] | UnsetType = UNSET
    tool_choice: Any = UNSET
    template_kwargs: Annotated[dict[str, Any], Meta(max_length=256)] | UnsetType = UNSET


class RolloutThinkingBudgetV1(Struct, kw_only=True, forbid_unknown_fields=True):
    """The finite limits, at least one of them, and the ids that kiln forces when one is reached."""

    max_tokens: NonNegative | UnsetType = UNSET
    max_time_ms: NonNegative | UnsetType = UNSET
    close_token_ids: Annotated[list[Uint32], Meta(min_length=1)]


class RolloutSamplingConfigV1(Struct, kw_only=True, forbid_unknown_fields=True):
    temperature: NonNegativeNumber
    top_p: Probability
    top_k: Uint32
    min_p: Probability
    max_tokens: Positive
    repetition_penalty: Annotated[float, Meta(gt=0)]
    presence_penalty: Penalty
    frequency_penalty: Penalty
    stop: Annotated[list[str], Meta(max_length=256)]
    thinking_budget: RolloutThinkingBudgetV1 | UnsetType = UNSET


class RolloutProvenanceV1(Struct, kw_only=True, forbid_unknown_fields=True):
    """`input_token_ids` is the prompt, `prompt_token_count` tokens long, and every generated token."""

    schema: Literal["kiln.rollout-provenance.v1"] = "kiln.rollout-provenance.v1"
    input_token_ids: Annotated[list[Uint32], Meta(min_length=1, max_length=2**24)]
    prompt_token_count: Positive
    prompt_messages_sha256: Sha256
    scored_payload_sha256: Sha256
    action_tokens: Annotated[list[RolloutActionTokenV1], Meta(min_length=1)]
    behavior_policy: RolloutBehaviorPolicyIdentityV1
    tokenizer: RolloutTokenizerIdentityV1
    template_invocation: RolloutChatTemplateInvocationV1 | UnsetType = UNSET
    sampling: RolloutSamplingConfigV1
    seed: Uint64
    generation_backend: Annotated[str, Meta(min_length=1, max_length=64, pattern=IDENTITY_PATTERN)]
