"""Picks tokens from logits, with the exact log-probability of what was drawn.

Order (the project's contract): logit bias -> penalties (repetition as in transformers over prompt and
generated tokens, then presence and frequency over generated tokens) -> mask of the grammar ->
temperature -> top-k -> min-p -> top-p -> draw. Temperature 0 is argmax. Draws come from Philox4x64 keyed
by (seed, choice index) with the token index as counter, so a draw does not depend on who else is in the
batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kiln.engine.ports import GenerationRequest

# Where less than one in so many tokens is allowed, picking them out costs less than masking the others.
_FEW = 16
_NEVER = np.float32(-np.inf)


class Allowed:
    """The tokens that a grammar leaves: by id where they are few, else as a mask of shape (n_vocab,)."""

    __slots__ = ("ids", "mask")

    def __init__(self, mask: NDArray[np.bool_]) -> None:
        self.mask = mask
        few = np.count_nonzero(mask) * _FEW <= len(mask)
        self.ids: NDArray[np.int64] | None = np.flatnonzero(mask) if few else None

    def without(self, token: int) -> Allowed:
        mask = self.mask.copy()
        mask[token] = False
        return Allowed(mask)


class SequenceSampler:
    """The sampling state of one sequence: its policy, its draw counter, the tokens it has seen."""

    __slots__ = ("_bias", "_counts", "_index", "_request", "_seen")

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._index = 0
        # Only filled when a penalty needs them: token id -> times generated, and all ids seen.
        self._counts: dict[int, int] = {}
        self._seen = set(request.prompt_ids) if request.sampling.repetition_penalty != 1.0 else None
        self._bias: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None
        if request.logit_bias:
            bias = request.logit_bias
            self._bias = (
                np.fromiter(bias, np.int64, len(bias)),
                np.fromiter(bias.values(), np.float32, len(bias)),
            )

    def record(self, token: int) -> None:
        """Note the token that was placed, sampled or forced."""
        self._index += 1
        if self._request.sampling.has_penalties:
            self._counts[token] = self._counts.get(token, 0) + 1
            if self._seen is not None:
                self._seen.add(token)

    def pick(
        self, logits: NDArray[np.float32], allowed: Allowed | None = None, attempt: int = 0
    ) -> tuple[int, float]:
        """Draw one token among the `allowed` ones, of which there is one at least.

        `logits` has shape (n_vocab,). Another `attempt` at the same place draws another number. Returns
        (token id, natural-log probability).
        """
        if allowed is not None and allowed.ids is not None and len(allowed.ids) == 1:
            return int(allowed.ids[0]), 0.0
        params = self._request.sampling
        if self._bias is not None:
            ids, values = self._bias
            logits = logits.copy()
            logits[ids] += values
        if params.has_penalties:
            logits = self._penalised(logits)
        if allowed is not None:
            if allowed.ids is None:
                return self._draw(np.where(allowed.mask, logits, _NEVER), attempt)
            place, logprob = self._draw(logits[allowed.ids], attempt)
            return int(allowed.ids[place]), logprob
        return self._draw(logits, attempt)

    def _draw(self, logits: NDArray[np.float32], attempt: int) -> tuple[int, float]:
        params = self._request.sampling
        if params.temperature == 0.0:
            return int(logits.argmax()), 0.0
        # The attempt is the counter's second word, so no two draws are of the same counter.
        draw = uniform(self._request.seed, self._request.choice_index, self._index + (attempt << 64))
        if params.top_p >= 1.0 and params.min_p <= 0.0 and not 0 < params.top_k < len(logits):
            return _draw_untruncated(logits, params.temperature, draw)
        ids, logprobs = final_distribution(
            logits, params.temperature, top_k=params.top_k, min_p=params.min_p, top_p=params.top_p
        )
        cumulative = np.exp(logprobs).cumsum()
        place = int(cumulative.searchsorted(draw * cumulative[-1], side="right"))
        place = min(place, len(ids) - 1)
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
    is_whole = len(logits) <= _BLOCK
    if is_whole:
        # Few tokens are sorted faster than searched.
        ids = (-logits).argsort(kind="stable")[: top_k if top_k > 0 else None]
        ids = ids[logits[ids] > _NEVER]
    elif 0 < top_k < len(logits):
        ids = top_ids(logits, top_k)
        ids = ids[logits[ids] > _NEVER]
    elif min_p > 0.0:
        ids = _descending(logits, _at_least(logits, temperature, -np.log(min_p)))
    elif top_p < 1.0:
        ids = _descending(logits, _nucleus(logits, temperature, top_p))
    else:
        ids = np.arange(len(logits))
    scaled = _scaled(logits[ids], temperature)
    if min_p > 0.0:
        keep = scaled >= np.log(min_p)
        keep[0] = True
        ids, scaled = ids[keep], scaled[keep]
    logprobs = _log_softmax(scaled)
    if top_p < 1.0:
        if not is_whole and not 0 < top_k < len(logits) and min_p <= 0.0:
            # The nucleus is measured against the whole vocabulary, of which `ids` is only the head.
            mass = np.exp(scaled).cumsum() / _total_weight(logits, temperature)
        else:
            mass = np.exp(logprobs).cumsum()
        keep = np.concatenate(([0.0], mass[:-1])) < top_p
        keep[0] = True
        ids, logprobs = ids[keep], _log_softmax(logprobs[keep])
    return ids, logprobs


def uniform(seed: int, choice: int, index: int) -> float:
    """A draw in [0, 1): the first word of Philox4x64-10 with key (seed, choice), counter index + 1.

    The same number as numpy's Generator(Philox(key=[seed, choice], counter=index)).random(), whose
    construction costs more than the ten rounds. Salmon et al., "Parallel random numbers: as easy as
    1, 2, 3", SC 2011.
    """
    counter = index + 1
    x0, x1, x2, x3 = counter & _MASK, counter >> 64, 0, 0
    k0, k1 = seed, choice
    for _ in range(10):
        p0, p1 = _PHILOX_M0 * x0, _PHILOX_M1 * x2
        x0, x1, x2, x3 = (p1 >> 64) ^ x1 ^ k0, p1 & _MASK, (p0 >> 64) ^ x3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _PHILOX_W0) & _MASK, (k1 + _PHILOX_W1) & _MASK
    return (x0 >> 11) * 2.0**-53


_MASK = 2**64 - 1
_PHILOX_M0, _PHILOX_M1 = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_PHILOX_W0, _PHILOX_W1 = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_BLOCK = 256
# Most nuclei lie within e^-8 of the best token; the search widens where they do not.
_FIRST_REACH = 8.0
# Beyond this a weight is nothing in double precision; masked tokens are at infinity.
_FARTHEST_REACH = 1000.0


def _draw_untruncated(logits: NDArray[np.float32], temperature: float, draw: float) -> tuple[int, float]:
    """Inverse-CDF draw over the whole vocabulary in id order, by blocks to keep the cumulation short."""
    weights = _weights(logits, temperature)
    sums = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64)
    blocks = sums.cumsum()
    target = draw * blocks[-1]
    block = _first_above(blocks, target)
    start = block * _BLOCK
    inside = weights[start : start + _BLOCK].cumsum(dtype=np.float64) + (blocks[block] - sums[block])
    token = start + _first_above(inside, target)
    logprob = float(_scaled(logits[token : token + 1], temperature, logits.max())[0] - np.log(blocks[-1]))
    return token, min(0.0, logprob)


def _first_above(cumulative: NDArray[np.float64], target: float) -> int:
    """The place of the first sum above `target`; where rounding lets none be, of the last that grew."""
    place = int(cumulative.searchsorted(target, side="right"))
    if place == len(cumulative):
        place = int(cumulative.searchsorted(cumulative[-1], side="left"))
    return place


def _scaled(
    values: NDArray[np.float32], temperature: float, top: np.float32 | None = None
) -> NDArray[np.float64]:
    """(value - max) / temperature; the spread is taken first, so that a tiny temperature gives no NaN."""
    spread = values.astype(np.float64) - float(values.max() if top is None else top)
    with np.errstate(over="ignore"):
        return np.asarray(np.maximum(spread / temperature, -1e30), np.float64)


def _weights(logits: NDArray[np.float32], temperature: float) -> NDArray[np.float32]:
    """exp((logit - max) / temperature) in single precision, for masses over a whole vocabulary."""
    with np.errstate(over="ignore", under="ignore"):
        spread = (logits - logits.max()) / np.float32(max(temperature, 1e-30))
        return np.asarray(np.exp(np.maximum(spread, np.float32(-200.0))), np.float32)


def _total_weight(logits: NDArray[np.float32], temperature: float) -> float:
    return float(_weights(logits, temperature).sum(dtype=np.float64))


def _at_least(logits: NDArray[np.float32], temperature: float, reach: float) -> NDArray[np.int64]:
    """Ids whose weight may be at least e^-reach of the best one's; a little too many, never too few."""
    bound = float(logits.max()) - temperature * reach
    return np.flatnonzero(logits >= np.float32(max(bound - 1e-3 - 1e-6 * abs(bound), -3e38)))


def _nucleus(logits: NDArray[np.float32], temperature: float, top_p: float) -> NDArray[np.int64]:
    """Ids that hold more than `top_p` of the mass; all less likely ones are outside the nucleus."""
    total = _total_weight(logits, temperature)
    reach = _FIRST_REACH
    while True:
        ids = _at_least(logits, temperature, reach)
        mass = float(np.exp(_scaled(logits[ids], temperature)).sum())
        # The slack covers the single precision of the total.
        if reach > _FARTHEST_REACH or mass > top_p * total * (1 + 1e-5):
            return ids
        reach *= 2


def _descending(logits: NDArray[np.float32], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ascending ids put in order of falling logit, the lower id first among equals."""
    return ids[np.argsort(-logits[ids], kind="stable")]


def top_ids(logits: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Ids of the k largest logits, largest first, the lower id first among equals."""
    whole = len(logits) // _BLOCK
    if k <= whole:
        # At least k values reach the k-th largest block maximum: a bound found without a full partition.
        maxima = logits[: whole * _BLOCK].reshape(whole, _BLOCK).max(axis=1)
        bound = np.partition(maxima, whole - k)[whole - k]
    else:
        bound = np.partition(logits, len(logits) - k)[len(logits) - k]
    return _descending(logits, np.flatnonzero(logits >= bound))[:k]


def _log_softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = values - values.max()
    total: np.float64 = np.exp(shifted).sum()
    return np.asarray(shifted - np.log(total), np.float64)
