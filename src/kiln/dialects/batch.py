"""The `/v1` dialect: batch generation, to core values and back."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from msgspec import UNSET

from kiln.core.budgets import Budget
from kiln.core.completion import ChoiceEnd
from kiln.core.errors import InvalidField
from kiln.core.turn import ChatTurn
from kiln.dialects.kiln import build_turn, check_adapters, check_common
from kiln.dialects.performance import finish_reason_name
from kiln.dialects.validate import decode
from kiln.thinking.budget import to_outcome
from kiln.wire import kiln as wire
from kiln.wire.thinking import ThinkingBudgetConfigurationMetadata


def decode_batch(body: bytes) -> wire.BatchCompletionRequest:
    """Decode and check a request body. Every refusal names the field."""
    request = decode(body, wire.BatchCompletionRequest)
    check_common(request)
    outputs = len(request.prompts) * (request.n or 1)
    if outputs > wire.MAX_BATCH_OUTPUTS:
        raise InvalidField(
            f"{len(request.prompts)} prompts with n={request.n} are {outputs} outputs, at most"
            f" {wire.MAX_BATCH_OUTPUTS} are served at once",
            param="n" if request.n and request.n > 1 else "prompts",
        )
    if isinstance(request.adapter, str) and isinstance(request.adapters, list):
        raise InvalidField("adapter and adapters exclude each other", param="adapters")
    check_adapters(request)
    return request


def to_turns(request: wire.BatchCompletionRequest) -> list[ChatTurn]:
    """One turn a prompt; settings are shared."""
    return [build_turn(request, messages, f"prompts[{i}]") for i, messages in enumerate(request.prompts)]


def to_batch_response(
    choices: Sequence[Sequence[ChoiceEnd | None]], prompt_tokens: Sequence[int], model: str, budget: Budget
) -> wire.BatchCompletionResponse:
    """Items in prompt order, then choice order; a choice that failed (None) becomes an error item."""
    items = [
        _to_item(prompt, index, choice, tokens)
        for prompt, (of_prompt, tokens) in enumerate(zip(choices, prompt_tokens, strict=True))
        for index, choice in enumerate(of_prompt)
    ]
    generated = sum(item.usage.completion_tokens for item in items)
    return wire.BatchCompletionResponse(
        id=f"batchcmpl-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=model,
        completions=items,
        # A prompt is processed once, however many choices it has.
        usage=_usage(sum(prompt_tokens), generated),
        metadata=wire.BatchCompletionMetadata(
            thinking_budget=ThinkingBudgetConfigurationMetadata(
                configured=budget.configured,
                max_tokens=UNSET if budget.tokens.value is None else budget.tokens.value,
                max_time_ms=UNSET if budget.time_ms.value is None else budget.time_ms.value,
                tokens_source=budget.tokens.source,
                time_source=budget.time_ms.source,
            )
        ),
    )


def _to_item(prompt: int, index: int, choice: ChoiceEnd | None, tokens: int) -> wire.BatchCompletionItem:
    if choice is None:
        return wire.BatchCompletionItem(
            prompt_index=prompt,
            completion_index=index,
            text="",
            finish_reason="error",
            usage=_usage(tokens, 0),
        )
    return wire.BatchCompletionItem(
        prompt_index=prompt,
        completion_index=index,
        text=choice.content,
        reasoning_content=choice.reasoning if choice.reasoning else UNSET,
        tool_calls=list(choice.tool_calls) if choice.tool_calls else UNSET,
        finish_reason=finish_reason_name(choice.finish_reason),
        thinking_budget=to_outcome(choice.outcome) if choice.outcome is not None else UNSET,
        usage=_usage(tokens, choice.completion_tokens),
    )


def _usage(prompt: int, completion: int) -> wire.Usage:
    return wire.Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)
