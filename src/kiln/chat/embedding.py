"""The embedding use case: inputs checked and tokenized, then computed by the embedding model's own thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kiln.core.errors import ContextExceeded, InvalidField, ModelNotFound, QueueFull
from kiln.core.text import shorten
from kiln.core.tokens import Tokenizer

MAX_INPUTS = 2048
TOO_LONG = "Shorten the input, or cut it into several."
MAX_WAITING = 64


class Embedder(Protocol):
    """A loaded embedding model. `embed` wants inputs of 1 to `context_length` tokens."""

    id: str
    dimensions: int
    context_length: int

    @property
    def tokenizer(self) -> Tokenizer: ...

    async def embed(self, inputs: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]: ...

    async def close(self) -> None: ...


class EmbeddingService:
    """Answers for the one embedding model of a server, or for its lack."""

    def __init__(self, embedder: Embedder | None) -> None:
        self.embedder = embedder
        pieces = () if embedder is None else embedder.tokenizer.pieces
        self._longest_piece = max((len(piece) for piece in pieces), default=1)
        self._waiting = 0

    def read(
        self, inputs: Sequence[str | tuple[int, ...]], *, model: str | None, dimensions: int | None
    ) -> list[tuple[int, ...]]:
        """Token ids of every input; for a worker thread. Raises RequestErrors that name what to mend."""
        embedder = self._find(model)
        if dimensions is not None and dimensions != embedder.dimensions:
            raise InvalidField(
                f"dimensions is {dimensions}; this model's vectors have {embedder.dimensions}",
                param="dimensions",
                hint="Leave it out.",
            )
        if len(inputs) > MAX_INPUTS:
            raise InvalidField(f"{len(inputs)} inputs are more than {MAX_INPUTS}", param="input")
        many = len(inputs) > 1
        return [
            self._ids(value, f"input[{i}]" if many else "input", embedder) for i, value in enumerate(inputs)
        ]

    async def embed(self, inputs: Sequence[tuple[int, ...]]) -> list[NDArray[np.float32]]:
        """The vectors of inputs that were read. Raises QueueFull, EngineFailed."""
        assert self.embedder is not None
        if self._waiting >= MAX_WAITING:
            raise QueueFull(f"{self._waiting} requests wait for the embedding model")
        self._waiting += 1
        try:
            return await self.embedder.embed(inputs)
        finally:
            self._waiting -= 1

    async def close(self) -> None:
        if self.embedder is not None:
            await self.embedder.close()

    def _find(self, model: str | None) -> Embedder:
        if self.embedder is None:
            raise ModelNotFound(
                "this server has no embedding model",
                param="model",
                hint="Start it with embedding.model_path set to an embedding model's GGUF.",
            )
        if model is not None and model != self.embedder.id:
            raise ModelNotFound(
                f"{shorten(model)} is no embedding model of this server",
                param="model",
                hint=f"The embedding model is {self.embedder.id}; leave `model` out to use it.",
            )
        return self.embedder

    def _ids(self, value: str | tuple[int, ...], param: str, embedder: Embedder) -> tuple[int, ...]:
        tokenizer, limit = embedder.tokenizer, embedder.context_length
        if isinstance(value, str):
            # Too long whatever its tokens are: not worth tokenizing.
            too_long = len(value) // self._longest_piece > limit
            value = () if too_long else tuple(tokenizer.encode(value, add_special=True, parse_special=False))
            if too_long or len(value) > limit:
                raise ContextExceeded(f"{param} has more than {limit} tokens", param=param, hint=TOO_LONG)
        if not value:
            raise InvalidField(f"{param} is empty", param=param)
        if len(value) > limit:
            raise ContextExceeded(
                f"{param} has {len(value)} tokens, at most {limit} are taken", param=param, hint=TOO_LONG
            )
        wrong = next((token for token in value if token >= tokenizer.n_vocab), None)
        if wrong is not None:
            raise InvalidField(
                f"token id {wrong} is not in the vocabulary of {tokenizer.n_vocab}", param=param
            )
        return value
