"""A text completion request, decoded, checked and turned into core values: one turn a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kiln.core.errors import InvalidField
from kiln.core.messages import Conversation
from kiln.core.turn import ChatTurn, RawPrompt
from kiln.dialects.openai.constraints import refuse_foreign, refuse_wishes_of_chat
from kiln.dialects.openai.sampling import (
    check_limits,
    check_stream,
    named_tier,
    read_adapters,
    read_bias,
    read_sampling,
    read_stops,
    read_tier,
)
from kiln.dialects.validate import decode, require_range
from kiln.wire import openai_text as wire
from kiln.wire.openai_chat import Tier

DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 5
MAX_OUTPUTS = 128


@dataclass(frozen=True, slots=True)
class TextReply:
    """How the answer is to be shaped. `choices` is how many each prompt has."""

    stream: bool
    include_usage: bool
    tier: Tier | None
    echo: bool
    logprobs: int | None
    token_ids: bool
    choices: int


def decode_text(body: bytes) -> wire.TextRequest:
    """Decode and check a request body. Every refusal names the field."""
    request = decode(body, wire.TextRequest)
    refuse_foreign(request)
    refuse_wishes_of_chat(request)
    if request.suffix is not None:
        raise InvalidField("suffix is not supported", param="suffix", hint="Put it into the prompt.")
    if request.best_of is not None and request.best_of != 1:
        raise InvalidField(
            "best_of is not supported", param="best_of", hint="Send n, and choose among its choices."
        )
    if request.logprobs is not None:
        require_range("logprobs", request.logprobs, 0, MAX_LOGPROBS)
    check_stream(request)
    check_limits(
        max_tokens=request.max_tokens,
        thinking_budget_tokens=request.thinking_budget_tokens,
        thinking_budget_ms=request.thinking_budget_ms,
    )
    return request


def to_reply(request: wire.TextRequest) -> TextReply:
    options = request.stream_options
    return TextReply(
        stream=request.stream is True,
        include_usage=options is not None and options.include_usage,
        tier=named_tier(request),
        echo=request.echo is True,
        logprobs=request.logprobs,
        token_ids=request.return_token_ids is True,
        choices=request.n if request.n is not None else 1,
    )


def to_turns(request: wire.TextRequest) -> list[ChatTurn]:
    """One turn a prompt; everything else is shared."""
    reply = to_reply(request)
    prompts = read_prompts(request.prompt, "prompt")
    if len(prompts) * reply.choices > MAX_OUTPUTS:
        raise InvalidField(
            f"{len(prompts)} prompts with n={reply.choices} are more than {MAX_OUTPUTS} completions",
            param="n" if reply.choices > 1 else "prompt",
        )
    # Token ids come with their scores.
    scored = reply.logprobs if reply.logprobs is not None else 0 if reply.token_ids else None
    adapters, adapters_field = read_adapters(request)
    sampling, stops, bias = read_sampling(request), read_stops(request), read_bias(request)
    return [
        ChatTurn(
            conversation=Conversation(messages=()),
            prompt=RawPrompt(prompt, add_special=request.add_special_tokens is not False),
            model=request.model,
            sampling=sampling,
            max_tokens=DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens,
            ignore_eos=request.ignore_eos is True,
            budget_tokens=request.thinking_budget_tokens,
            budget_ms=request.thinking_budget_ms,
            stop=stops,
            seed=request.seed,
            n=reply.choices,
            logit_bias=bias,
            top_logprobs=scored,
            adapters=adapters,
            adapters_field=adapters_field,
            priority=read_tier(request.service_tier),
        )
        for prompt in prompts
    ]


def read_prompts(value: str | Sequence[str | int | Sequence[int]], param: str) -> list[str | tuple[int, ...]]:
    """The prompts of OpenAI's four forms: a text, texts, token ids, lists of token ids."""
    if isinstance(value, str):
        return [value]
    if not value:
        raise InvalidField(f"{param} is empty", param=param)
    if all(isinstance(item, int) for item in value):
        return [tuple(item for item in value if isinstance(item, int))]
    found: list[str | tuple[int, ...]] = []
    for i, item in enumerate(value):
        if isinstance(item, int):
            raise InvalidField(f"{param} mixes token ids with other things", param=f"{param}[{i}]")
        if not item:
            raise InvalidField(f"{param}[{i}] is empty", param=f"{param}[{i}]")
        found.append(item if isinstance(item, str) else tuple(item))
    return found
