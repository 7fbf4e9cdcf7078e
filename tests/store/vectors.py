"""An embedder without a model: words that mean the same share a direction."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MEANINGS = {
    "cat": "animal",
    "dog": "animal",
    "pet": "animal",
    "cats": "animal",
    "car": "vehicle",
    "bike": "vehicle",
}


class WordVectors:
    """Implements `Embedder`: counts of words, hashed into 64 dimensions."""

    def __init__(self, name: str = "words", dimensions: int = 64) -> None:
        self.name = name
        self.texts: list[str] = []
        self._dimensions = dimensions

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.texts.extend(texts)
        rows = np.zeros((len(texts), self._dimensions), np.float32)
        for row, text in zip(rows, texts, strict=True):
            for word in re.findall(r"\w+", text.casefold()):
                row[zlib.crc32(MEANINGS.get(word, word).encode()) % self._dimensions] += 1
        return rows
