"""Seeded draws: lengths of prompts and outputs, and the arrival times of an open loop."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from kiln.core.errors import ConfigError

MAX_TOKENS = 1_000_000
FORMS = "N, uniform:LOW:HIGH or lognormal:MEAN:SIGMA[:MAX]"


class Lengths(Protocol):
    """A distribution of token counts."""

    def draw(self, rng: random.Random) -> int:
        """At least 1."""


@dataclass(frozen=True, slots=True)
class Fixed:
    tokens: int

    def draw(self, rng: random.Random) -> int:
        return self.tokens


@dataclass(frozen=True, slots=True)
class Uniform:
    """Both ends are included."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """`mean` is the arithmetic mean in tokens, `sigma` the standard deviation of the natural logarithm;
    draws above `most` are cut to it."""

    mean: float
    sigma: float
    most: int = MAX_TOKENS

    def draw(self, rng: random.Random) -> int:
        drawn = rng.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return max(1, min(self.most, round(min(drawn, self.most))))


def parse_lengths(text: str, flag: str) -> Lengths:
    """`128`, `uniform:64:512`, `lognormal:256:0.8` or `lognormal:256:0.8:2048`. Raises ConfigError."""
    name, *arguments = text.split(":")
    try:
        if not arguments:
            return Fixed(_tokens(name))
        if name == "uniform" and len(arguments) == 2:
            low, high = (_tokens(argument) for argument in arguments)
            if low > high:
                raise ValueError("its low end is above its high end")
            return Uniform(low, high)
        if name == "lognormal" and len(arguments) in (2, 3):
            mean, sigma = float(_tokens(arguments[0])), float(arguments[1])
            if not 0 <= sigma <= 10:
                raise ValueError("its sigma must be from 0 to 10")
            return Lognormal(mean, sigma, *(_tokens(argument) for argument in arguments[2:]))
    except ValueError as error:
        raise ConfigError(f"{flag} is {text!r}: {error}", hint=f"Write {FORMS}.") from None
    raise ConfigError(f"{flag} is {text!r}", hint=f"Write {FORMS}.")


def _tokens(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_TOKENS):
        raise ValueError(f"{text!r} is no number of tokens from 1 to {MAX_TOKENS}")
    return int(text)


def poisson_arrivals(rate_per_s: float, seed: int | str) -> Iterator[float]:
    """Arrival times in seconds after the start, without end; the first one is at 0."""
    rng = random.Random(f"arrivals:{seed}")
    gaps = (rng.expovariate(rate_per_s) for _ in itertools.count())
    return itertools.accumulate(gaps, initial=0.0)
