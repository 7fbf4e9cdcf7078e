"""The `/v1` dialect: prompt scoring through the completions endpoint, to core values and back."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from kiln.core.errors import InvalidField
from kiln.core.scoring import ScoredPrompt
from kiln.dialects.validate import decode
from kiln.wire import kiln as wire


def decode_scoring(body: bytes) -> wire.TextCompletionRequest:
    """Decode and check a request body. Every refusal names the field."""
    try:
        request = decode(body, wire.TextCompletionRequest)
    except InvalidField as error:
        # Most callers who stumble here want text: say what the route is for.
        error.hint = "This route scores a prompt; generate text with POST /v1/chat/completions."
        raise
    if request.stream:
        raise InvalidField("prompt scoring does not stream", param="stream", hint="Leave `stream` out.")
    return request


def to_scoring_response(scored: ScoredPrompt, pieces: Sequence[bytes]) -> wire.TextCompletionResponse:
    """One map a token: the token that stands there, and the likeliest ones; null for the first token."""
    logprobs: list[wire.PromptLogprobMap | None] = [None]
    for position in scored.positions:
        entries = {
            str(token): _entry(logprob, rank, pieces[token])
            for rank, (token, logprob) in enumerate(position.top, start=1)
        }
        entries.setdefault(
            str(position.token_id), _entry(position.logprob, position.rank, pieces[position.token_id])
        )
        logprobs.append(entries)
    count = len(scored.prompt_ids)
    return wire.TextCompletionResponse(
        id=f"cmpl-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=scored.model,
        system_fingerprint=scored.fingerprint,
        choices=[
            wire.TextCompletionChoice(index=0, text="", finish_reason="length", prompt_logprobs=logprobs)
        ],
        usage=wire.Usage(prompt_tokens=count, completion_tokens=0, total_tokens=count),
    )


def _entry(logprob: float, rank: int, piece: bytes) -> wire.PromptLogprobEntry:
    text = piece.decode("utf-8", "replace")
    return wire.PromptLogprobEntry(logprob=logprob, rank=rank, decoded_token=text)
