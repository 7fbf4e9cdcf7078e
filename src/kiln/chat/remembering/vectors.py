"""The server's embedding model, as memory uses it: from worker threads, on texts of any length."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kiln.chat.embedding import Embedder
from kiln.core.errors import EngineFailed

# A recall waits for a vector no longer than this; without one it goes by words.
PATIENCE_S = 20.0


class MemoryVectors:
    """Implements the store's `Embedder`. Make it on the event loop, call it on other threads."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._loop = asyncio.get_running_loop()

    @property
    def name(self) -> str:
        return self._embedder.id

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """One row a text, of its beginning where it is too long; zeros where it has no tokens.

        Raises EngineFailed.
        """
        vectors = np.zeros((len(texts), self._embedder.dimensions), np.float32)
        ids = {row: found for row, text in enumerate(texts) if (found := self._tokens(text))}
        if ids:
            computing = asyncio.run_coroutine_threadsafe(self._embedder.embed(list(ids.values())), self._loop)
            try:
                computed = computing.result(PATIENCE_S)
            except TimeoutError:
                computing.cancel()
                raise EngineFailed(f"the embedding model took more than {PATIENCE_S:g} seconds") from None
            vectors[list(ids)] = np.stack(computed)
        return vectors

    def _tokens(self, text: str) -> Sequence[int]:
        tokenizer, limit = self._embedder.tokenizer, self._embedder.context_length
        longest = max(len(piece) for piece in tokenizer.pieces)
        # What cannot be among the tokens that are kept is not tokenized.
        beginning = text[: limit * longest]
        return tuple(tokenizer.encode(beginning, add_special=True, parse_special=False))[:limit]
