"""The bundled model driven through llama.cpp's own functions, with adapters; nothing of kiln between."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as native
from numpy.typing import NDArray

from kiln.backends.llamacpp import LlamaModel


class NativeModel:
    """One sequence, greedy."""

    def __init__(self, path: Path) -> None:
        self.model = LlamaModel(path)
        params = native.llama_context_default_params()
        params.n_ctx = 1024
        params.n_threads = params.n_threads_batch = 1
        self._context = native.llama_init_from_model(self.model.pointer, params)
        self._adapters: list[Any] = []

    def use(self, *adapters: tuple[Path, float]) -> None:
        """Run with these converted adapters from now on."""
        pointers = [native.llama_adapter_lora_init(self.model.pointer, str(p).encode()) for p, _ in adapters]
        assert all(pointers), "llama.cpp cannot load the adapter"
        self._adapters += pointers
        kinds = native.llama_adapter_lora_p_ctypes * len(pointers)
        scales = (ctypes.c_float * len(pointers))(*(scale for _, scale in adapters))
        array = kinds(*(ctypes.cast(p, native.llama_adapter_lora_p_ctypes) for p in pointers))
        assert native.llama_set_adapters_lora(self._context, array, len(pointers), scales) == 0

    def logits(self, prompt: Sequence[int]) -> NDArray[np.float32]:
        """Logits after the last token."""
        native.llama_memory_clear(native.llama_get_memory(self._context), True)
        return self._feed(prompt)

    def generate(self, prompt: Sequence[int], most: int) -> list[int]:
        row, written = self.logits(prompt), []
        while True:
            written.append(int(row.argmax()))
            if len(written) == most or written[-1] in self.model.eos_ids:
                return written
            row = self._feed(written[-1:])

    def close(self) -> None:
        native.llama_free(self._context)
        self.model.close()

    def _feed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        array = (native.llama_token * len(tokens))(*tokens)
        assert native.llama_decode(self._context, native.llama_batch_get_one(array, len(tokens))) == 0
        pointer = native.llama_get_logits_ith(self._context, -1)
        return np.array(np.ctypeslib.as_array(pointer, (self.model.n_vocab,)))
