"""Order statistics. Quantiles follow definition 7 of Hyndman and Fan (1996), as numpy and R do by default."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def quantile(ordered: Sequence[float], q: float) -> float:
    """The q-quantile (0 <= q <= 1) of values in ascending order. Raises ValueError without values."""
    if not ordered:
        raise ValueError("no values to take a quantile of")
    if not 0 <= q <= 1:
        raise ValueError(f"a quantile is between 0 and 1, not {q}")
    position = (len(ordered) - 1) * q
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


@dataclass(frozen=True, slots=True)
class Summary:
    """A sample in six figures, in the unit of its values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def summarize(values: Iterable[float]) -> Summary | None:
    """None where there is nothing to summarize: not measured is not zero."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Summary(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        p50=quantile(ordered, 0.5),
        p90=quantile(ordered, 0.9),
        p99=quantile(ordered, 0.99),
        max=ordered[-1],
    )


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and how far the values lie around it: quartiles and extremes."""

    count: int
    median: float
    q1: float
    q3: float
    low: float
    high: float


def spread(values: Iterable[float]) -> Spread | None:
    """None where there are no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Spread(
        count=len(ordered),
        median=quantile(ordered, 0.5),
        q1=quantile(ordered, 0.25),
        q3=quantile(ordered, 0.75),
        low=ordered[0],
        high=ordered[-1],
    )
