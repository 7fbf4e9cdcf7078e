"""Picks tokens from logits, with the exact log-probability of what was drawn.

Order (the project's contract): penalties (repetition as in transformers over prompt and generated
tokens, then presence and frequency over generated tokens) -> temperature -> top-k -> min-p ->
top-p -> draw. Temperature 0 is argmax. Draws come from Philox4x64 keyed by (seed, choice index)
with the token index as counter, so a draw does not depend on who else is in the batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kiln.engine.ports import GenerationRequest


class SequenceSampler:
    """The sampling state of one sequence: its policy, its draw counter, the tokens it has seen."""

    __slots__ = ("_counts", "_index", "_request", "_seen")

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._index = 0
        # Only filled when a penalty needs them: token id -> times generated, and all ids seen.
        self._counts: dict[int, int] = {}
        self._seen = set(request.prompt_ids) if request.sampling.repetition_penalty != 1.0 else None

    def record(self, token: int) -> None:
        """Note the token that was placed, sampled or forced."""
        self._index += 1
        if self._request.sampling.has_penalties:
            self._counts[token] = self._counts.get(token, 0) + 1
            if self._seen is not None:
                self._seen.add(token)

    def pick(self, logits: NDArray[np.float32]) -> tuple[int, float]:
        """Draw one token. `logits` has shape (n_vocab,). Returns (token id, natural-log probability)."""
        params = self._request.sampling
        if params.has_penalties:
            logits = self._penalised(logits)
        if params.temperature == 0.0:
            return int(logits.argmax()), 0.0
        ids, logprobs = final_distribution(
            logits, params.temperature, top_k=params.top_k, min_p=params.min_p, top_p=params.top_p
        )
        cumulative = np.exp(logprobs).cumsum()
        draw = uniform(self._request.seed, self._request.choice_index, self._index) * cumulative[-1]
        place = min(int(cumulative.searchsorted(draw, side="right")), len(ids) - 1)
        return int(ids[place]), min(0.0, float(logprobs[place]))

    def _penalised(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        params = self._request.sampling
        logits = logits.copy()
        if self._seen:
            ids = np.fromiter(self._seen, np.int64, len(self._seen))
            values = logits[ids]
            factor = np.float32(params.repetition_penalty)
            logits[ids] = np.where(values > 0, values / factor, values * factor)
        if self._counts and (params.presence_penalty != 0.0 or params.frequency_penalty != 0.0):
            ids = np.fromiter(self._counts, np.int64, len(self._counts))
            counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            logits[ids] -= np.float32(params.presence_penalty) + counts * np.float32(params.frequency_penalty)
        return logits


def final_distribution(
    logits: NDArray[np.float32], temperature: float, *, top_k: int, min_p: float, top_p: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The candidates that survive truncation, most likely first, and their renormalised log-probabilities.

    `logits` shape (n_vocab,), temperature > 0. The most likely token always survives. Ties are
    broken by token id, so that the order never depends on the sorting algorithm.
    """
    n_vocab = len(logits)
    if 0 < top_k < n_vocab:
        ids = _top(logits, top_k)
    elif min_p > 0.0 or top_p < 1.0:
        ids = np.lexsort((np.arange(n_vocab), -logits))
    else:
        ids = np.arange(n_vocab)
    # The spread is taken before the division, so that a tiny temperature gives -inf and not a NaN.
    values = logits[ids].astype(np.float64)
    scaled = np.maximum((values - values.max()) / temperature, -1e30)
    if min_p > 0.0:
        keep = scaled >= np.log(min_p)
        ids, scaled = ids[keep], scaled[keep]
    logprobs = _log_softmax(scaled)
    if top_p < 1.0:
        before = np.concatenate(([0.0], np.exp(logprobs).cumsum()[:-1]))
        keep = before < top_p
        keep[0] = True
        ids, logprobs = ids[keep], _log_softmax(logprobs[keep])
    return ids, logprobs


def uniform(seed: int, choice: int, index: int) -> float:
    """A draw in [0, 1): Philox4x64-10 with key (seed, choice) and counter `index`."""
    bits = np.random.Philox(key=np.array([seed, choice], np.uint64), counter=index)
    return float(np.random.Generator(bits).random())


def _top(logits: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Ids of the k largest logits, largest first, the lower id first among equals."""
    threshold = np.partition(logits, len(logits) - k)[len(logits) - k]
    ids = np.flatnonzero(logits >= threshold)
    order = np.lexsort((ids, -logits[ids]))
    return ids[order[:k]]


def _log_softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = values - values.max()
    total: np.float64 = np.exp(shifted).sum()
    return np.asarray(shifted - np.log(total), np.float64)
