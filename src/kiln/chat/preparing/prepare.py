"""From a turn to engine requests: render, tokenize, resolve the budget, refuse what cannot fit.

Pure and synchronous; runs on a worker thread, never on the event loop or the engine thread.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kiln.adapters.selection import Selection
from kiln.chat.models.served import ServedModel
from kiln.chat.preparing.bias import resolve_bias
from kiln.chat.preparing.presets import preset
from kiln.chat.preparing.raw import read_raw, refuse_hopeless
from kiln.chat.structured.grammar import to_grammar
from kiln.core.budgets import Budget
from kiln.core.completion import ThinkingSource, ThinkingState
from kiln.core.errors import (
    CloseCannotFit,
    ContextExceeded,
    EmptyPrompt,
    InvalidField,
    ModelNotFound,
    StopOverlapsClose,
)
from kiln.core.messages import Conversation
from kiln.core.rollout import PolicyIdentity
from kiln.core.sampling import MAX_SEED, SamplingParams, resolve_sampling
from kiln.core.text import shorten
from kiln.core.turn import ChatTurn
from kiln.engine.ports import AdapterUse, GenerationRequest, ThinkingSpec
from kiln.text.template import RenderedPrompt, encode_prompt
from kiln.text.tool_calls.check import schemas_of
from kiln.thinking.budget import applies, resolve_budget
from kiln.thinking.gate import GateLimits, stop_overlaps_close


@dataclass(frozen=True, slots=True)
class Prepared:
    """A turn that can be submitted. `requests` is empty when no completion token is allowed.

    `policy` is there for provenance requests. `seconds` is what the preparation took. `tools` are the
    parameters of the tools by name. `adapters` keeps the files that the requests name.
    """

    turn: ChatTurn
    prompt_ids: tuple[int, ...]
    requests: tuple[GenerationRequest, ...]
    sampling: SamplingParams
    seed: int
    max_tokens: int
    thinking: ThinkingState
    in_reasoning: bool
    budget: Budget
    budget_applied: bool
    parses_tools: bool
    policy: PolicyIdentity | None
    adapters: Selection
    close_ids: tuple[int, ...]
    seconds: float
    tools: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar holds the answer."""
        return bool(self.requests) and self.requests[0].grammar is not None

    @property
    def guarantees_calls(self) -> bool:
        """Whether a grammar holds the tool calls, so that arguments may be shown while they are written."""
        policy = self.turn.tool_policy
        return self.is_constrained and policy is not None and policy.mode in ("required", "named")


def prepare(turn: ChatTurn, model: ServedModel) -> Prepared:
    """Raises the RequestError that names what the caller can mend, or AdaptersNotReady."""
    started = time.monotonic()
    if turn.model is not None and turn.model != model.id:
        raise ModelNotFound(f"the model {shorten(turn.model)} is not served here", param="model")
    adapters = model.adapters.resolve(turn.adapters, turn.adapters_field)
    conversation, thinking = _decide_thinking(turn.conversation, model)
    prompt_ids, in_reasoning = _read_prompt(turn, conversation, thinking, model)
    max_tokens = _fit(turn, prompt_ids, model)
    budget = budget_of(turn, model)
    applied = model.close is not None and applies(
        budget, starts_in_reasoning=in_reasoning, max_tokens=max_tokens
    )
    if applied:
        _check_close(turn, max_tokens, len(prompt_ids), model)
    if turn.provenance:
        _check_provenance(turn, max_tokens, applied, model)
    # A template that leaves the opening to the model thinks although kiln cannot arm the gate.
    leaves_open = model.template_thinking.leaves_open_to_model and turn.prompt is None
    enabled = in_reasoning or (leaves_open and thinking.enabled)
    prepared = Prepared(
        # With the arguments that the prompt was really rendered with.
        turn=replace(turn, conversation=conversation),
        prompt_ids=prompt_ids,
        requests=(),
        sampling=resolve_sampling(turn.sampling, preset(turn.sampling_preset), model.sampling_defaults),
        seed=turn.seed if turn.seed is not None else secrets.randbelow(MAX_SEED + 1),
        max_tokens=max_tokens,
        thinking=replace(thinking, enabled=enabled),
        in_reasoning=in_reasoning,
        budget=budget,
        budget_applied=applied,
        parses_tools=bool(turn.conversation.tools) and turn.conversation.tool_choice != "none",
        policy=replace(model.policy(), adapter=adapters.identity) if turn.provenance else None,
        adapters=adapters,
        close_ids=model.close.ids if model.close is not None else (),
        seconds=time.monotonic() - started,
        tools=schemas_of(turn.conversation.tools),
    )
    if max_tokens == 0:
        return prepared
    return replace(prepared, requests=_to_requests(prepared, model))


def budget_of(turn: ChatTurn, model: ServedModel) -> Budget:
    """A turn's limits over the server's defaults."""
    return resolve_budget(
        default_tokens=model.budget_tokens_default,
        default_time_ms=model.budget_ms_default,
        request_tokens=turn.budget_tokens,
        request_time_ms=turn.budget_ms,
    )


def _decide_thinking(conversation: Conversation, model: ServedModel) -> tuple[Conversation, ThinkingState]:
    """Who decides whether the prompt thinks: the request's enable_thinking, the server, or the template."""
    kwargs = conversation.template_kwargs
    default = model.thinks_by_default
    if "enable_thinking" in kwargs:
        asked = kwargs["enable_thinking"]
        source: ThinkingSource = "request" if isinstance(asked, bool) else "custom"
        return conversation, ThinkingState(bool(asked), source, default)
    if model.thinking_default is not None:
        kwargs = {**kwargs, "enable_thinking": model.thinking_default}
        return replace(conversation, template_kwargs=kwargs), ThinkingState(
            default, "server_default", default
        )
    return conversation, ThinkingState(default, "template_default", default)


def tokens_of(turn: ChatTurn, model: ServedModel, *, generation: bool) -> tuple[int, ...]:
    """The token ids of a turn's prompt; without `generation` what opens the answer is left out."""
    conversation, thinking = _decide_thinking(turn.conversation, model)
    if generation or turn.prompt is not None:
        return _read_prompt(turn, conversation, thinking, model)[0]
    return _encode(model.template.render(conversation, add_generation_prompt=False), model)


def _read_prompt(
    turn: ChatTurn, conversation: Conversation, thinking: ThinkingState, model: ServedModel
) -> tuple[tuple[int, ...], bool]:
    """Token ids, and whether they end inside a reasoning block."""
    if turn.prompt is not None:
        return read_raw(turn.prompt, model)
    prompt = _render(conversation, thinking, model)
    return _encode(prompt, model), model.tags is not None and prompt.ends_with(model.tags.open)


def _render(conversation: Conversation, thinking: ThinkingState, model: ServedModel) -> RenderedPrompt:
    prompt = model.template.render(conversation)
    seed = model.seeds_open_tag and thinking.enabled and model.tags is not None
    if seed and model.tags is not None and not prompt.ends_with(model.tags.open):
        return prompt.with_suffix(f"{model.tags.open}\n")
    return prompt


def _encode(prompt: RenderedPrompt, model: ServedModel) -> tuple[int, ...]:
    refuse_hopeless(prompt.text, model)
    ids = encode_prompt(prompt, model.tokenizer)
    if model.bos_id is not None and ids[:1] != [model.bos_id]:
        ids = [model.bos_id, *ids]
    return tuple(ids)


def _fit(turn: ChatTurn, prompt_ids: tuple[int, ...], model: ServedModel) -> int:
    """The completion limit after clamping to the context window."""
    if not prompt_ids:
        raise EmptyPrompt("there is nothing in the prompt, not a single token", param="messages")
    room = model.context_length - len(prompt_ids)
    asked = turn.max_tokens if turn.max_tokens is not None else model.max_tokens_default
    if room < 1 and (asked > 0 or room < 0):
        raise ContextExceeded(
            f"the prompt has {len(prompt_ids)} tokens, the context holds {model.context_length}"
            " with the completion",
            param="messages",
        )
    return min(asked, room)


def _check_close(turn: ChatTurn, max_tokens: int, prompt_tokens: int, model: ServedModel) -> None:
    assert model.close is not None and model.tags is not None
    need = len(model.close.ids)
    if max_tokens < need:
        room = model.context_length - prompt_tokens
        clamped = room <= max_tokens
        raise CloseCannotFit(
            f"closing the thinking takes {need} tokens, but only {max_tokens} can be generated"
            + (f" in a context of {model.context_length}" if clamped else ""),
            param="messages" if clamped else turn.max_tokens_field,
        )
    for stop in turn.stop:
        if stop_overlaps_close(stop, model.tags.close):
            raise StopOverlapsClose(
                f"the stop string {shorten(stop)} overlaps the closing tag {model.tags.close!r}", param="stop"
            )


def _check_provenance(turn: ChatTurn, max_tokens: int, applied: bool, model: ServedModel) -> None:
    close = len(model.close.ids) if applied and model.close is not None else 0
    if max_tokens <= close:
        raise InvalidField(
            "rollout_provenance needs room for a sampled token"
            + (f" beside the {close} of the closing tag" if close else ""),
            param=turn.max_tokens_field,
            hint="Raise max_tokens.",
        )


def _to_requests(prepared: Prepared, model: ServedModel) -> tuple[GenerationRequest, ...]:
    turn, thinking = prepared.turn, None
    grammar = to_grammar(turn, model, in_reasoning=prepared.in_reasoning, thinks=prepared.thinking.enabled)
    bias = resolve_bias(turn.logit_bias, model.tokenizer)
    if prepared.in_reasoning and model.close is not None:
        # Without an applied budget the gate only watches, so that the thinking can be skipped.
        thinking = ThinkingSpec(
            model.close, _gate_limits(prepared) if prepared.budget_applied else GateLimits()
        )
    return tuple(
        GenerationRequest(
            prompt_ids=prepared.prompt_ids,
            max_tokens=prepared.max_tokens,
            sampling=prepared.sampling,
            seed=(prepared.seed + index) % (MAX_SEED + 1) if turn.seed_per_choice else prepared.seed,
            choice_index=0 if turn.seed_per_choice else index,
            eos_ids=frozenset() if turn.ignore_eos else model.tokenizer.eos_ids,
            thinking=thinking,
            exact=_is_exact(turn, model),
            cacheable=_is_cacheable(prepared),
            priority=turn.priority,
            scope=prepared.adapters.scope,
            adapters=tuple(AdapterUse(path, scale) for path, scale in prepared.adapters.uses),
            logit_bias=bias,
            top_logprobs=turn.top_logprobs,
            grammar=grammar,
            narrated=turn.narrated,
        )
        for index in range(turn.n)
    )


def _is_exact(turn: ChatTurn, model: ServedModel) -> bool:
    return model.exact == "always" or (model.exact == "auto" and (turn.provenance or turn.seed is not None))


def _is_cacheable(prepared: Prepared) -> bool:
    """Whether the request alone decides the tokens, and nothing of how they came about is reported.

    A stop string cuts the generation where only its reader can see, so there is no whole to keep.
    """
    turn = prepared.turn
    deterministic = turn.seed is not None or prepared.sampling.temperature == 0.0
    timed = prepared.budget_applied and prepared.budget.time_ms.value is not None
    return deterministic and not (timed or turn.stop or turn.provenance or turn.measured)


def _gate_limits(prepared: Prepared) -> GateLimits:
    time_ms = prepared.budget.time_ms.value
    return GateLimits(
        max_tokens=prepared.budget.tokens.value,
        max_time_s=None if time_ms is None else time_ms / 1000,
        completion_tokens=prepared.max_tokens,
    )
