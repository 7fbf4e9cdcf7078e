"""Rollout provenance: core values to the contract's record. Hashes are over canonical JSON.

Canonical JSON: keys sorted, no spaces, UTF-8; absent fields left out.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from msgspec import UNSET

from kiln.core.messages import Conversation, Message
from kiln.core.rollout import AdapterIdentity, PolicyIdentity, Rollout
from kiln.core.tokens import Source
from kiln.wire import rollouts as wire

IMPLEMENTATION = "kiln"


def to_provenance(rollout: Rollout) -> wire.RolloutProvenanceV1:
    """The record of one rollout."""
    prompt = rollout.prompt_ids
    ids = [*prompt, *(token.token_id for token in rollout.tokens)]
    return wire.RolloutProvenanceV1(
        input_token_ids=ids,
        prompt_token_count=len(prompt),
        prompt_messages_sha256=canonical_sha256(
            [_message(message) for message in rollout.conversation.messages]
        ),
        scored_payload_sha256=canonical_sha256(ids),
        action_tokens=_actions(rollout),
        behavior_policy=_policy(rollout.policy),
        tokenizer=wire.RolloutTokenizerIdentityV1(
            vocab_sha256=rollout.policy.vocabulary,
            config_sha256=rollout.policy.tokenizer_config,
            chat_template_sha256=rollout.policy.chat_template,
        ),
        template_invocation=_invocation(rollout.conversation),
        sampling=_sampling(rollout),
        seed=rollout.seed,
        generation_backend=rollout.policy.backend,
    )


def canonical_sha256(value: Any) -> str:
    """`sha256:` and the hex digest of a value's canonical JSON."""
    canonical = msgspec.json.encode(value, order="sorted")
    return "sha256:" + hashlib.sha256(canonical).hexdigest()


def fingerprint(policy: PolicyIdentity) -> str:
    """The content address of what prompt scores depend on."""
    return canonical_sha256(list(policy.fingerprint))


def _actions(rollout: Rollout) -> list[wire.RolloutActionTokenV1]:
    actions: list[wire.RolloutActionTokenV1] = []
    for index, token in enumerate(rollout.tokens, start=len(rollout.prompt_ids)):
        if token.source is Source.SAMPLED:
            assert token.logprob is not None
            actions.append(
                wire.SampledActionTokenV1(
                    sequence_index=index, token_id=token.token_id, behavior_logprob=token.logprob
                )
            )
        else:
            actions.append(
                wire.ForcedActionTokenV1(sequence_index=index, token_id=token.token_id, behavior_logprob=None)
            )
    return actions


def _policy(policy: PolicyIdentity) -> wire.RolloutBehaviorPolicyIdentityV1:
    return wire.RolloutBehaviorPolicyIdentityV1(
        served_model_id=policy.served_model_id,
        base_model_sha256=policy.base_model,
        adapter=_adapter(policy.adapter),
        inference_config_sha256=policy.inference_config,
        implementation=IMPLEMENTATION,
    )


def _adapter(adapter: AdapterIdentity | None) -> wire.RolloutAdapterIdentityV1 | msgspec.UnsetType:
    if adapter is None:
        return UNSET
    return wire.RolloutAdapterIdentityV1(name=adapter.name, content_sha256=adapter.content_sha256)


def _sampling(rollout: Rollout) -> wire.RolloutSamplingConfigV1:
    params = rollout.sampling
    return wire.RolloutSamplingConfigV1(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        max_tokens=rollout.max_tokens,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        stop=list(rollout.stop),
        thinking_budget=_budget(rollout) if rollout.budget_applied else UNSET,
    )


def _budget(rollout: Rollout) -> wire.RolloutThinkingBudgetV1:
    tokens, time_ms = rollout.budget.tokens.value, rollout.budget.time_ms.value
    return wire.RolloutThinkingBudgetV1(
        max_tokens=UNSET if tokens is None else tokens,
        max_time_ms=UNSET if time_ms is None else time_ms,
        close_token_ids=list(rollout.close_ids),
    )


def _invocation(conversation: Conversation) -> wire.RolloutChatTemplateInvocationV1 | msgspec.UnsetType:
    """Only template arguments: a provenance request has no tools."""
    if not conversation.template_kwargs:
        return UNSET
    return wire.RolloutChatTemplateInvocationV1(template_kwargs=conversation.template_kwargs)


def _message(message: Message) -> dict[str, Any]:
    fields = ("role", "content", "reasoning_content", "tool_calls", "name", "tool_call_id")
    return {name: value for name in fields if (value := getattr(message, name)) is not None}
