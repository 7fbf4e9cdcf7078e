"""Scores of a prompt's tokens, as values."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct


class PositionScore(Struct, frozen=True, array_like=True):
    """The raw log-softmax at one prompt position: the token that stands there, and the likeliest ones.

    `rank` is one-based over the whole vocabulary, ties by token id; `top` is most likely first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """A scored prompt: positions after the first, in order. `fingerprint` addresses what scored it."""

    model: str
    fingerprint: str
    prompt_ids: tuple[int, ...]
    positions: tuple[PositionScore, ...]
