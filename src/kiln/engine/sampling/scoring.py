"""Prompt scores from logits: raw log-softmax, rank over the whole vocabulary, the likeliest tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kiln.core.scoring import PositionScore
from kiln.engine.sampling.sampler import top_ids


def score_position(logits: NDArray[np.float32], token: int, top_k: int) -> PositionScore:
    """Score the token that follows the position of `logits` (shape (n_vocab,)).

    The normaliser is accumulated in double precision, so that the log-probability agrees with the
    sampler's at temperature 1 without truncation.
    """
    top = float(logits.max())
    log_total = float(np.log(np.exp(logits.astype(np.float64) - top).sum()))
    observed = logits[token]
    rank = 1 + int(np.count_nonzero(logits > observed))
    rank += int(np.count_nonzero(logits[:token] == observed))

    def logprob(value: np.float32) -> float:
        return min(0.0, float(value) - top - log_total)

    best = top_ids(logits, min(top_k, len(logits))) if top_k > 0 else ()
    return PositionScore(
        token_id=token,
        logprob=logprob(observed),
        rank=rank,
        top=tuple((int(i), logprob(logits[i])) for i in best),
    )
