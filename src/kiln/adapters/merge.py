"""Merging adapters of one base model into a new one.

Everything is computed on the deltas (scaling * B @ A), in float64, module by module; a module that an
adapter leaves alone counts as a zero delta. `concat` is the exact sum. The other two have no exact form
of low rank: their best approximation of the asked rank is kept, and how much was lost is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from kiln.adapters.config import MAX_RANK, LoraConfig, config_json
from kiln.adapters.weights import Pair
from kiln.wire.adapters import MergeMethod

# Up to this size the exact decomposition of a dense matrix takes well under a second.
_EXACT_SIDE = 1024
_OVERSAMPLES = 16
_POWER_STEPS = 4

Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Source:
    """One adapter to merge and the weight of its delta."""

    config: LoraConfig
    pairs: dict[str, Pair]
    weight: float


@dataclass(frozen=True, slots=True)
class Merged:
    """The new adapter. `relative_error` is the Frobenius norm lost, over that of the exact merge."""

    config: bytes
    pairs: dict[str, Pair]
    rank: int
    relative_error: float


@dataclass(frozen=True, slots=True)
class Factors:
    """A delta as `b @ a`."""

    b: Matrix
    a: Matrix


class CannotMerge(ValueError):
    """A concatenation would have more than MAX_RANK rows, or values would be no numbers."""


def merge(sources: Sequence[Source], method: MergeMethod, *, rank: int | None, density: float) -> Merged:
    """Merge adapters. `rank` None = the largest of theirs. `density` is the share that TIES keeps.

    Weights of `weighted_average` must not add up to zero. Raises CannotMerge.
    """
    limit = rank if rank is not None else max(_largest_rank(source) for source in sources)
    if method == "concat":
        _check_concat(sources)
    pairs: dict[str, Pair] = {}
    lost = whole = 0.0
    # The linear algebra library would spin on every core, against the engine that is decoding there.
    with threadpool_limits(1, user_api="blas"), np.errstate(over="ignore", invalid="ignore"):
        for module in sorted({module for source in sources for module in source.pairs}):
            factors, off, norm = _merge_module(module, sources, method, limit, density)
            pairs[module] = Pair(factors.a.astype(np.float32), factors.b.astype(np.float32))
            lost, whole = lost + off**2, whole + norm**2
    top = max(pair.a.shape[0] for pair in pairs.values())
    return Merged(
        config=_config(sources, pairs, top),
        pairs=pairs,
        rank=top,
        relative_error=float(np.sqrt(lost / whole)) if whole > 0 else 0.0,
    )


def _check_concat(sources: Sequence[Source]) -> None:
    """Refuse ranks that add up to too much before any work is put into them."""
    ranks: Counter[str] = Counter()
    for source in sources:
        ranks.update({module: pair.a.shape[0] for module, pair in source.pairs.items()})
    top = max(ranks.values())
    if top > MAX_RANK:
        raise CannotMerge(f"the merged adapter would have the rank {top}, at most {MAX_RANK} is served")


def _merge_module(
    module: str, sources: Sequence[Source], method: MergeMethod, rank: int, density: float
) -> tuple[Factors, float, float]:
    """The factors, the norm of what they miss, and the norm of the exact delta."""
    scaled = [(_factors(source, module), source.weight) for source in sources if module in source.pairs]
    if method == "ties":
        # An adapter without this module has no entry that could agree with the others.
        return low_rank(ties([f.b @ f.a for f, _ in scaled], [w for _, w in scaled], density), rank)
    if method == "concat":
        exact = concat(scaled)
        return exact, 0.0, float(np.linalg.norm(_finite(exact.b @ exact.a)))
    # Also adapters without this module have a say in the average.
    total = sum(source.weight for source in sources)
    return low_rank_product(concat([(f, w / total) for f, w in scaled]), rank)


def concat(parts: Sequence[tuple[Factors, float]]) -> Factors:
    """The weighted sum of deltas, exactly: its rank is the sum of theirs."""
    return Factors(
        b=np.concatenate([weight * factors.b for factors, weight in parts], axis=1),
        a=np.concatenate([factors.a for factors, _ in parts], axis=0),
    )


def ties(deltas: Sequence[Matrix], weights: Sequence[float], density: float) -> Matrix:
    """TIES (arXiv 2306.01708): trim, elect a sign an entry, average those that agree with it.

    Of each delta the largest `density` share of the entries stays.
    """
    trimmed = [weight * _trim(delta, density) for delta, weight in zip(deltas, weights, strict=True)]
    elected = np.sign(sum(trimmed))
    total = np.zeros_like(deltas[0])
    mass = np.zeros_like(deltas[0])
    for delta, weight in zip(trimmed, weights, strict=True):
        agrees = (np.sign(delta) == elected) & (delta != 0)
        total += np.where(agrees, delta, 0.0)
        mass += np.where(agrees, abs(weight), 0.0)
    return np.divide(total, mass, out=np.zeros_like(total), where=mass > 0)


def low_rank_product(factors: Factors, rank: int) -> tuple[Factors, float, float]:
    """The best approximation of a product, without ever forming it."""
    qb, rb = np.linalg.qr(_finite(factors.b))
    qa, ra = np.linalg.qr(factors.a.T)
    u, values, v = np.linalg.svd(rb @ ra.T, full_matrices=False)
    return _split(qb @ u, values, v @ qa.T, rank, float(np.linalg.norm(values)))


def low_rank(delta: Matrix, rank: int) -> tuple[Factors, float, float]:
    """The best approximation of a dense matrix; for large ones, nearly the best."""
    norm = float(np.linalg.norm(_finite(delta)))
    if min(delta.shape) <= max(_EXACT_SIDE, rank + _OVERSAMPLES):
        u, values, v = np.linalg.svd(delta, full_matrices=False)
        return _split(u, values, v, rank, norm)
    # Subspace iteration. The draws are fixed, so that a merge can be repeated.
    draws = np.random.Generator(np.random.Philox(0))
    span = delta @ draws.standard_normal((delta.shape[1], rank + _OVERSAMPLES))
    for _ in range(_POWER_STEPS):
        span = delta @ (delta.T @ np.linalg.qr(span)[0])
    basis = np.linalg.qr(span)[0]
    u, values, v = np.linalg.svd(basis.T @ delta, full_matrices=False)
    return _split(basis @ u, values, v, rank, norm)


def _split(u: Matrix, values: Matrix, v: Matrix, rank: int, norm: float) -> tuple[Factors, float, float]:
    kept = min(rank, len(values))
    root = np.sqrt(values[:kept])
    missed = max(0.0, norm**2 - float((values[:kept] ** 2).sum()))
    return Factors(b=u[:, :kept] * root, a=root[:, None] * v[:kept]), float(np.sqrt(missed)), norm


def _finite(matrix: Matrix) -> Matrix:
    # Squares are taken of it, and float32 holds the result.
    if not (np.abs(matrix) < 1e38).all():
        raise CannotMerge("with these weights the merged adapter's values get too large")
    return matrix


def _trim(delta: Matrix, density: float) -> Matrix:
    """The matrix with all but its largest entries zero; exactly `density` of them stay, rounded up."""
    kept = int(np.ceil(density * delta.size))
    order = np.argpartition(np.abs(delta), delta.size - kept, axis=None)[delta.size - kept :]
    trimmed = np.zeros_like(delta)
    trimmed.flat[order] = delta.flat[order]
    return trimmed


def _factors(source: Source, module: str) -> Factors:
    pair = source.pairs[module]
    return Factors(
        b=source.config.scaling_of(module) * pair.b.astype(np.float64), a=pair.a.astype(np.float64)
    )


def _largest_rank(source: Source) -> int:
    return max(int(pair.a.shape[0]) for pair in source.pairs.values())


def _config(sources: Sequence[Source], pairs: dict[str, Pair], rank: int) -> bytes:
    """A configuration under which the factors are the delta: every module's alpha is its rank."""
    others = {module: pair.a.shape[0] for module, pair in pairs.items() if pair.a.shape[0] != rank}
    bases = {source.config.base_model for source in sources}
    return config_json(
        rank=rank,
        alpha=float(rank),
        targets={module.rpartition(".")[2] for module in pairs},
        rank_pattern=others,
        alpha_pattern={module: float(value) for module, value in others.items()},
        base_model=bases.pop() if len(bases) == 1 else None,
    )
