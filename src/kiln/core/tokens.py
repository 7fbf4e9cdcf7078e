"""What the engine says about generated tokens, and what a tokenizer offers."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from kiln.core.scoring import PositionScore


class Source(StrEnum):
    """Who chose a token: the sampler, or the thinking gate in its place."""

    SAMPLED = "sampled"
    FORCED = "forced"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"
    ERROR = "error"
    CANCELLED = "cancelled"


class TokenEvent(Struct, frozen=True, array_like=True):
    """One accepted token.

    `logprob` is the natural-log probability of a sampled token under the final, renormalised
    sampling distribution; None for a forced one. `ready_s` is `time.monotonic()` of the step
    that produced it. `score` is the token's place in the raw distribution, for requests that ask.
    """

    token_id: int
    source: Source
    logprob: float | None
    ready_s: float
    score: PositionScore | None = None


class Tokenizer(Protocol):
    """The model's own tokenizer. Safe to call from any thread.

    `pieces[i]` are the bytes of token i, control tokens included. `added_spellings` are the
    spellings of all added tokens (control and user-defined), longest first;
    `control_spellings` is the subset marked as control.
    """

    @property
    def n_vocab(self) -> int: ...

    @property
    def pieces(self) -> Sequence[bytes]: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def bos_text(self) -> str: ...

    @property
    def eos_text(self) -> str: ...

    @property
    def added_spellings(self) -> Sequence[str]: ...

    @property
    def control_spellings(self) -> Sequence[str]: ...

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        """Token ids of `text`; with `parse_special`, added-token spellings become their ids."""
        ...
