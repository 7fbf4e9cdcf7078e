"""Text completions, embeddings and tokens of the OpenAI-compatible profile.

The shapes are those of OpenAI's older completions endpoint; `return_token_ids` and the token routes are
named as in vLLM. As elsewhere in this profile what does not apply is absent; the lists of `logprobs` alone
hold null, for the first token of a prompt, which nothing predicts.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from kiln.wire.common import NonNegative, Uint32
from kiln.wire.openai_chat import Message, ProfileFields, Refused, Tier, Tool, Usage

FinishName = Literal["stop", "length", "content_filter"]


class TextRequest(ProfileFields, kw_only=True):
    """`prompt` is a text, a list of texts, token ids, or a list of lists of token ids."""

    prompt: str | list[str | Uint32 | list[Uint32]]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    suffix: Refused = None
    response_format: Refused = None
    tools: Refused = None
    tool_choice: Refused = None
    functions: Refused = None
    function_call: Refused = None


class TextLogprobs(Struct, kw_only=True):
    """Of every token: text, log-probability, the likeliest ones (itself included), offset in the text.

    Offsets count characters from the beginning of `text`.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[NonNegative]


class TextChoice(Struct, kw_only=True):
    index: NonNegative
    text: str
    logprobs: TextLogprobs | UnsetType = UNSET
    finish_reason: FinishName | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class TextResponse(Struct, kw_only=True):
    """A whole completion, or a chunk of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: NonNegative
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType = UNSET
    service_tier: Tier | UnsetType = UNSET


class TokenizeRequest(Struct, kw_only=True):
    """Either `prompt`, or `messages` with what else the template renders."""

    prompt: str | UnsetType = UNSET
    messages: list[Message] | UnsetType = UNSET
    model: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class TokenizeResponse(Struct, kw_only=True):
    count: NonNegative
    max_model_len: NonNegative
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeRequest(Struct, kw_only=True):
    tokens: list[Uint32]
    model: str | None = None


class DetokenizeResponse(Struct, kw_only=True):
    prompt: str


class EmbeddingRequest(Struct, kw_only=True):
    """`input` is a text, a list of texts, token ids, or a list of lists of token ids."""

    input: str | list[str | Uint32 | list[Uint32]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None


class Embedding(Struct, kw_only=True):
    """`embedding` in base64 is the numbers as little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: NonNegative
    embedding: list[float] | str


class EmbeddingUsage(Struct, kw_only=True):
    prompt_tokens: NonNegative
    total_tokens: NonNegative


class EmbeddingResponse(Struct, kw_only=True):
    object: Literal["list"] = "list"
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
