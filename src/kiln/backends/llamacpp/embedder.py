"""An embedding model on llama.cpp: texts in, unit vectors out. One context, owned by one thread."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import llama_cpp.llama_cpp as native
import numpy as np
from numpy.typing import NDArray

from kiln.backends.llamacpp.model import LlamaModel
from kiln.core.errors import EngineFailed, ModelLoadError
from kiln.core.tokens import Tokenizer

# Inputs computed in one call at most.
SEQUENCES = 16
LARGEST_INPUT = 8192
_POOLINGS = {
    "mean": native.LLAMA_POOLING_TYPE_MEAN,
    "cls": native.LLAMA_POOLING_TYPE_CLS,
    "last": native.LLAMA_POOLING_TYPE_LAST,
}


class LlamaEmbedder:
    """Implements the `Embedder` port."""

    def __init__(self, path: Path, *, pooling: str, threads: int) -> None:
        """`pooling` auto takes what the file says, the mean where it says nothing. Raises ModelLoadError."""
        self._model = LlamaModel(path)
        self.id = path.stem
        self.context_length = min(self._model.train_context or LARGEST_INPUT, LARGEST_INPUT)
        self._context = self._open(pooling, threads)
        self.dimensions = int(native.llama_model_n_embd(self._model.pointer))
        self._batch = native.llama_batch_init(self.context_length, 0, 1)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kiln-embed")
        self._closing = threading.Event()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._model

    async def embed(self, inputs: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Vectors of unit length, in order. Inputs have 1 to `context_length` tokens. Raises EngineFailed.

        When the caller is cancelled what was not begun is not computed.
        """
        loop = asyncio.get_running_loop()
        vectors: list[NDArray[np.float32]] = []
        for group in self._groups(inputs):
            vectors.extend(await loop.run_in_executor(self._thread, self._compute, group))
        return vectors

    async def close(self) -> None:
        """Free the native memory, once the present call is done."""
        self._closing.set()
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)
        native.llama_batch_free(self._batch)
        native.llama_free(self._context)
        self._model.close()

    def _open(self, pooling: str, threads: int) -> native.llama_context_p:
        kind = _POOLINGS.get(pooling)
        if kind is None:
            metadata = self._model.metadata
            stated = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
            kind = int(stated) if stated in ("1", "2", "3") else native.LLAMA_POOLING_TYPE_MEAN
        params = native.llama_context_default_params()
        params.embeddings = True
        params.pooling_type = kind
        # Pooling wants every sequence whole in one micro batch.
        params.n_ctx = params.n_batch = params.n_ubatch = self.context_length
        params.n_seq_max = SEQUENCES
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        context = native.llama_init_from_model(self._model.pointer, params)
        if not context:
            self._model.close()
            raise ModelLoadError(f"cannot create a context to embed with {self._model.path}")
        return context

    def _groups(self, inputs: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
        """Inputs that fit into one call together."""
        group: list[Sequence[int]] = []
        size = 0
        for ids in inputs:
            if group and (size + len(ids) > self.context_length or len(group) == SEQUENCES):
                yield group
                group, size = [], 0
            group.append(ids)
            size += len(ids)
        if group:
            yield group

    def _compute(self, group: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        if self._closing.is_set():
            raise EngineFailed("the embedding model is being closed")
        self._fill(group)
        memory = native.llama_get_memory(self._context)
        if memory:
            native.llama_memory_clear(memory, True)
        status = native.llama_decode(self._context, self._batch)
        if status != 0:
            raise EngineFailed(f"llama_decode returned {status} while embedding")
        return [self._vector(sequence) for sequence in range(len(group))]

    def _fill(self, group: Sequence[Sequence[int]]) -> None:
        batch, row = self._batch, 0
        for sequence, ids in enumerate(group):
            for position, token in enumerate(ids):
                batch.token[row] = token
                batch.pos[row] = position
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = sequence
                batch.logits[row] = 1
                row += 1
        batch.n_tokens = row

    def _vector(self, sequence: int) -> NDArray[np.float32]:
        pointer = native.llama_get_embeddings_seq(self._context, sequence)
        if not pointer:
            raise EngineFailed("llama.cpp returned no embedding")
        address = ctypes.cast(pointer, ctypes.c_void_p).value
        assert address is not None
        values = (ctypes.c_float * self.dimensions).from_address(address)
        vector = np.array(np.ctypeslib.as_array(values), np.float32)
        length = float(np.linalg.norm(vector))
        return vector / np.float32(length) if length > 0.0 else vector
