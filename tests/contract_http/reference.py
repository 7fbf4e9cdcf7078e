"""The served model through llama.cpp's plain C functions, apart from everything that is kiln's."""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp.llama_cpp as native
import numpy as np
from numpy.typing import NDArray

from kiln.backends.llamacpp.library import start_backend


class Reference:
    """One model and a small context of it."""

    def __init__(self, path: Path) -> None:
        start_backend()
        weights = native.llama_model_default_params()
        self._model = native.llama_model_load_from_file(str(path).encode(), weights)
        params = native.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = 512, 1, 1
        params.flash_attn_type = native.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = native.llama_init_from_model(self._model, params)
        self._vocab = native.llama_model_get_vocab(self._model)
        self.n_vocab = int(native.llama_vocab_n_tokens(self._vocab))

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        data = text.encode()
        buffer = (native.llama_token * (len(data) + 8))()
        count = native.llama_tokenize(self._vocab, data, len(data), buffer, len(buffer), special, True)
        return list(buffer[:count])

    def log_softmax(self, ids: list[int]) -> NDArray[np.float64]:
        """Row i is the distribution after ids[:i + 1]; shape (len(ids), n_vocab). At most 63 ids."""
        batch = native.llama_batch_init(len(ids), 0, 1)
        try:
            batch.n_tokens = len(ids)
            for i, token in enumerate(ids):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, i, 1
                batch.seq_id[i][0], batch.logits[i] = 0, 1
            native.llama_memory_clear(native.llama_get_memory(self._context), True)
            assert native.llama_decode(self._context, batch) == 0
            address = ctypes.cast(native.llama_get_logits(self._context), ctypes.c_void_p).value
            assert address is not None
            values = (ctypes.c_float * (len(ids) * self.n_vocab)).from_address(address)
            logits = np.ctypeslib.as_array(values).reshape(len(ids), self.n_vocab).astype(np.float64)
        finally:
            native.llama_batch_free(batch)
        shifted = logits - logits.max(axis=1, keepdims=True)
        result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        return result

    def close(self) -> None:
        native.llama_free(self._context)
        native.llama_model_free(self._model)
