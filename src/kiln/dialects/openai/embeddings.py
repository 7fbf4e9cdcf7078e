"""Embedding requests and responses."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kiln.dialects.validate import decode
from kiln.wire import openai_text as wire


def decode_embedding(body: bytes) -> wire.EmbeddingRequest:
    return decode(body, wire.EmbeddingRequest)


def to_embedding_response(
    vectors: Sequence[NDArray[np.float32]], tokens: int, model: str, *, in_base64: bool
) -> wire.EmbeddingResponse:
    return wire.EmbeddingResponse(
        model=model,
        data=[
            wire.Embedding(index=i, embedding=_base64(vector) if in_base64 else vector.tolist())
            for i, vector in enumerate(vectors)
        ],
        usage=wire.EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens),
    )


def _base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
