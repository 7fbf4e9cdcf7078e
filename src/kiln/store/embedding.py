"""Texts as vectors, where a model for that is configured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Embedder(Protocol):
    """Makes vectors whose cosine says how close texts are in meaning. Called on worker threads."""

    @property
    def name(self) -> str:
        """Which model; vectors of different ones are never compared."""
        ...

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """One row a text, shape (texts, dimensions), float32."""
        ...


def to_blob(vector: NDArray[np.float32]) -> bytes:
    """A vector as sqlite-vec reads it."""
    return np.ascontiguousarray(vector, dtype="<f4").tobytes()
