"""The rows of one model call, in the arrays that llama_decode reads."""

from __future__ import annotations

import ctypes

import llama_cpp.llama_cpp as native
import numpy as np
from numpy.typing import NDArray

from kiln.engine.runner import ModelCall


class RowBatch:
    """A llama_batch whose arrays are numpy's, filled in place each call."""

    def __init__(self, rows: int) -> None:
        self._tokens = np.zeros(rows, np.int32)
        self._positions = np.zeros(rows, np.int32)
        self._sequences = np.zeros(rows, np.int32)
        self._counts = np.ones(rows, np.int32)
        self._outputs = np.zeros(rows, np.int8)
        # llama_batch.seq_id is an array of pointers, one to each row's list of sequence ids.
        base = np.uint64(self._sequences.ctypes.data)
        self._sequence_pointers = base + np.uint64(4) * np.arange(rows, dtype=np.uint64)
        pointer = ctypes.POINTER
        self.struct = native.llama_batch()
        self.struct.embd = None
        self.struct.token = self._tokens.ctypes.data_as(pointer(native.llama_token))
        self.struct.pos = self._positions.ctypes.data_as(pointer(native.llama_pos))
        self.struct.n_seq_id = self._counts.ctypes.data_as(pointer(ctypes.c_int32))
        self.struct.seq_id = ctypes.cast(
            ctypes.c_void_p(self._sequence_pointers.ctypes.data), pointer(pointer(native.llama_seq_id))
        )
        self.struct.logits = self._outputs.ctypes.data_as(pointer(ctypes.c_int8))

    def fill(self, call: ModelCall, pad: int | None) -> tuple[NDArray[np.int64], int, bool]:
        """Write the call's rows. Returns which outputs are wanted, how many there are, and if one row pads.

        With `pad` (a spare sequence) rows and outputs are at least two. Unquantized matrices, also those
        of adapters, take another kernel for a single row, and for the single output row of a longer call;
        attention of a single row adds in another order once 512 cells are in use.
        """
        row = 0
        for chunk in call.chunks:
            end = row + len(chunk.tokens)
            self._tokens[row:end] = chunk.tokens
            self._positions[row:end] = np.arange(chunk.start, chunk.start + len(chunk.tokens))
            self._sequences[row:end] = chunk.sequence
            self._outputs[row:end] = chunk.logits == "all"
            self._outputs[end - 1] = chunk.logits != "none"
            row = end
        wanted = self._outputs[:row] != 0
        outputs = int(wanted.sum())
        padded = pad is not None and row == 1
        if padded and pad is not None:
            self._tokens[row], self._positions[row], self._sequences[row] = 0, 0, pad
            self._outputs[row] = outputs
            row += 1
        elif pad is not None and outputs == 1:
            self._outputs[row - 2 if wanted[row - 1] else row - 1] = 1
        self.struct.n_tokens = row
        written = np.flatnonzero(self._outputs[:row])
        return np.flatnonzero(wanted[written[written < len(wanted)]]), len(written), padded
