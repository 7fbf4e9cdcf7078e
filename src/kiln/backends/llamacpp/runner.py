"""A llama.cpp context behind the `ModelRunner` port.

One context is owned by one thread. Native memory is freed by `close`, never by the garbage collector.
"""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp.llama_cpp as native
import numpy as np
from numpy.typing import NDArray

from kiln.backends.exactness import prove_exactness
from kiln.backends.llamacpp.batch import RowBatch
from kiln.backends.llamacpp.library import recent_errors
from kiln.backends.llamacpp.lora import AdapterShelf
from kiln.backends.llamacpp.model import LlamaModel
from kiln.core.errors import EngineFailed, ModelLoadError
from kiln.engine.runner import KVExhausted, ModelCall

MAX_ROWS = 2048
MICRO_BATCH = 512
# llama.cpp rounds the KV cache up to this.
KV_GRANULE = 256


class LlamaRunner:
    """One llama.cpp context as a `ModelRunner`: unified KV cache, flash attention, a preallocated batch."""

    def __init__(
        self, model: LlamaModel, *, sequences: int, kv_cells: int, threads: int, adapters: int = 8
    ) -> None:
        """`sequences` resident at once, over `kv_cells` cells; `adapters` are kept loaded.

        Raises ModelLoadError, also for memory.
        """
        params = native.llama_context_default_params()
        # Two more sequences: one for padding rows, with a granule of cells, and one for the dead.
        params.n_ctx = kv_cells + KV_GRANULE
        params.n_seq_max = sequences + 2
        self._padding, self._dead = sequences, sequences + 1
        params.n_batch = MAX_ROWS
        params.n_ubatch = MICRO_BATCH
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        params.flash_attn_type = native.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self.n_vocab = model.n_vocab
        self.sequences = sequences
        self.kv_cells = kv_cells
        self.max_rows = MAX_ROWS
        self.can_share = model.memory_can_be_cut
        self._pointer = native.llama_init_from_model(model.pointer, params)
        if not self._pointer:
            reason = "; ".join(recent_errors) or "not enough memory?"
            raise ModelLoadError(
                f"cannot create a context of {kv_cells} cells for {sequences} sequences: {reason}",
                hint="Lower --ctx-size or --parallel.",
            )
        self._memory = native.llama_get_memory(self._pointer)
        self._batch = RowBatch(MAX_ROWS + 1)
        self._adapters = AdapterShelf(model.pointer, self._pointer, most=adapters, errors=recent_errors)
        self.adapter_s = 0.0
        self._exactness = prove_exactness(self)
        self.exact_drafts = self._exactness.holds and self._exactness.with_drafts

    def execute(self, call: ModelCall) -> NDArray[np.float32]:
        self.adapter_s = self._adapters.use(call.adapters)
        pad = self._padding if call.exact else None
        wanted, outputs, padded = self._batch.fill(call, pad)
        status = native.llama_decode(self._pointer, self._batch.struct)
        if padded:
            native.llama_memory_seq_rm(self._memory, self._padding, -1, -1)
        if status == 1:
            raise KVExhausted
        if status != 0:
            raise EngineFailed(f"llama_decode returned {status}: {'; '.join(recent_errors)}")
        if not len(wanted):
            return np.empty((0, self.n_vocab), np.float32)
        pointer = native.llama_get_logits(self._pointer)
        address = ctypes.cast(pointer, ctypes.c_void_p).value
        if address is None:
            raise EngineFailed("llama.cpp returned no logits")
        values = (ctypes.c_float * (outputs * self.n_vocab)).from_address(address)
        logits: NDArray[np.float32] = np.ctypeslib.as_array(values).reshape(outputs, self.n_vocab)
        return logits if len(wanted) == outputs else logits[wanted]

    def drop(self, sequence: int) -> None:
        # A freed cell would be taken next, whoever comes: hand the cells to the dead instead.
        if self.can_share:
            native.llama_memory_seq_cp(self._memory, sequence, self._dead, -1, -1)
        native.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def length(self, sequence: int) -> int:
        return int(native.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def trim(self, sequence: int, length: int) -> None:
        native.llama_memory_seq_cp(self._memory, sequence, self._dead, length, -1)
        native.llama_memory_seq_rm(self._memory, sequence, length, -1)

    def collect(self) -> None:
        native.llama_memory_seq_rm(self._memory, self._dead, -1, -1)

    def copy(self, source: int, target: int, length: int) -> None:
        native.llama_memory_seq_cp(self._memory, source, target, 0, length)

    def save(self, sequence: int, most_bytes: int) -> NDArray[np.uint8] | None:
        size = native.llama_state_seq_get_size(self._pointer, sequence)
        if size > most_bytes:
            return None
        data = np.empty(size, np.uint8)
        native.llama_state_seq_get_data(self._pointer, _bytes_of(data), size, sequence)
        return data

    def restore(self, sequence: int, data: NDArray[np.uint8]) -> None:
        if native.llama_state_seq_set_data(self._pointer, _bytes_of(data), data.nbytes, sequence) == 0:
            raise EngineFailed(f"saved KV cannot be restored: {'; '.join(recent_errors)}")

    def describe(self) -> dict[str, object]:
        return {
            "backend": "llama.cpp",
            "prefix_cache": self.can_share,
            "exactness": {
                "proven": self._exactness.holds,
                "detail": self._exactness.detail,
                "with_drafts": self.exact_drafts,
            },
        }

    def close(self) -> None:
        if self._pointer is not None:
            self._adapters.close()
            native.llama_free(self._pointer)
            self._pointer = None


def _bytes_of(data: NDArray[np.uint8]) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
