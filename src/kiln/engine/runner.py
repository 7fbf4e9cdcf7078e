"""The port that the engine computes through: a `ModelRunner` runs one model call at a time.

A local backend implements it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kiln.engine.ports import AdapterSet

LogitsWanted = Literal["none", "last", "all"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence: `tokens` go to positions `start`, `start + 1`, ...

    `logits` says for which of them logits are wanted.
    """

    sequence: int
    start: int
    tokens: Sequence[int]
    logits: LogitsWanted

    @property
    def outputs(self) -> int:
        return {"none": 0, "last": 1, "all": len(self.tokens)}[self.logits]


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One call of the model: either decode chunks, of one token and its draft, or prefill chunks.

    An `exact` call has at most 63 rows, and its results do not depend on which rows they are.
    All rows are computed with `adapters`, in the form that `adapter_set` gives.
    """

    chunks: tuple[Chunk, ...]
    exact: bool = False
    adapters: AdapterSet = ()

    @property
    def rows(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)


class KVExhausted(Exception):
    """The KV cache has no place for a call; nothing was computed."""


class AdapterFailed(Exception):
    """An adapter of a call cannot be loaded; nothing was computed."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class ModelRunner(Protocol):
    """Runs model calls. Owned by one thread; every method is called on it.

    `sequences` is how many sequences may be resident, `kv_cells` how many tokens in all,
    `max_rows` the most rows one call may have. `can_share` says whether prefixes can be copied and
    trimmed, `exact_drafts` whether exact rows keep their bits when drafts are verified and trimmed.
    `adapter_s` is how many seconds of the last call went into loading adapters and putting them in force.
    """

    n_vocab: int
    sequences: int
    kv_cells: int
    max_rows: int
    can_share: bool
    exact_drafts: bool
    adapter_s: float

    def execute(self, call: ModelCall) -> NDArray[np.float32]:
        """Run a call. Returns logits, shape (wanted rows, n_vocab), in chunk order.

        The array is a view that the next call overwrites. Raises KVExhausted if the cache is full,
        AdapterFailed if an adapter cannot be used, EngineFailed if the native library reports an error.
        """
        ...

    def drop(self, sequence: int) -> None:
        """Empty a sequence. Its cells stay taken until `collect`, so that the order of cells is kept."""
        ...

    def length(self, sequence: int) -> int:
        """Tokens that a sequence holds."""
        ...

    def trim(self, sequence: int, length: int) -> None:
        """Drop what a sequence holds behind its first `length` tokens. The cells stay taken likewise."""
        ...

    def collect(self) -> None:
        """Free the cells of everything that was dropped."""
        ...

    def copy(self, source: int, target: int, length: int) -> None:
        """Let the empty sequence `target` share the first `length` KV entries of `source`."""
        ...

    def save(self, sequence: int, most_bytes: int) -> NDArray[np.uint8] | None:
        """The KV of a sequence, for `restore`; None, and nothing is copied, if it is over `most_bytes`."""
        ...

    def restore(self, sequence: int, data: NDArray[np.uint8]) -> None:
        """Put saved KV into an empty sequence. Raises EngineFailed if there is no room for all of it."""
        ...

    def describe(self) -> Mapping[str, object]:
        """Facts about this runner for `/v1/config`: backend, prefix cache, exactness."""
        ...

    def close(self) -> None:
        """Free native memory. The runner is unusable afterwards."""
        ...
