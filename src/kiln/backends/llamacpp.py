"""llama.cpp behind the `ModelRunner` and `Tokenizer` ports, through llama-cpp-python's low-level C API.

Calls and their costs follow llama.h of the pinned release. One context is owned by one thread; a
`LlamaModel` (weights and vocabulary) is read-only after loading and may be shared. Native memory is
freed by `close`, never by the garbage collector.
"""

from __future__ import annotations

import ctypes
import logging
import re
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import llama_cpp
import llama_cpp.llama_cpp as native
import numpy as np
from numpy.typing import NDArray

from kiln.backends.exactness import prove_exactness
from kiln.backends.lora import AdapterShelf
from kiln.core.errors import EngineFailed, ModelLoadError
from kiln.core.sampling import SamplingOverrides
from kiln.engine.ports import KVExhausted, ModelCall

log = logging.getLogger("kiln.llamacpp")

PINNED = "0.3.36"
MAX_ROWS = 2048
MICRO_BATCH = 512
# llama.cpp rounds the KV cache up to this.
KV_GRANULE = 256

# The library warns about many harmless things; only its errors concern an operator.
_GGML_LEVELS = {3: logging.INFO, 4: logging.ERROR}
_recent_errors: list[str] = []
_backend_lock = threading.Lock()
_backend_ready = False


@native.llama_log_callback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes, _user_data: Any) -> None:
    line = text.decode("utf-8", "replace").strip()
    if not line:
        return
    if level >= 4:
        _recent_errors.append(line)
        del _recent_errors[:-8]
    log.log(_GGML_LEVELS.get(level, logging.DEBUG), "%s", line)


def start_backend() -> None:
    """Initialise the library once, and check that bindings and library are of one release.

    A struct that differs in layout reads wrong values silently, so known defaults are compared.
    """
    global _backend_ready
    with _backend_lock:
        if _backend_ready:
            return
        defaults = native.llama_context_default_params()
        layout = (
            defaults.n_batch,
            defaults.n_ubatch,
            defaults.n_seq_max,
            defaults.swa_full,
            defaults.no_perf,
        )
        if llama_cpp.__version__ != PINNED or layout != (2048, 512, 1, True, True):
            raise ModelLoadError(
                f"llama-cpp-python {llama_cpp.__version__} with context defaults {layout} is not the pinned "
                f"{PINNED}: bindings and library must be of one release",
                hint=f"Install llama-cpp-python=={PINNED} again, as `make setup` does.",
            )
        native.llama_log_set(_on_log, None)
        native.llama_backend_init()
        _backend_ready = True


class LlamaModel:
    """Loaded weights and vocabulary. Implements the `Tokenizer` port; its methods are thread-safe."""

    def __init__(self, path: Path, *, vocabulary_only: bool = False) -> None:
        """With `vocabulary_only` the weights are not read: it tokenizes and tells facts, no more."""
        start_backend()
        if not path.is_file():
            raise ModelLoadError(f"no model file at {path}", hint="Give the path of a .gguf file.")
        params = native.llama_model_default_params()
        params.vocab_only = vocabulary_only
        if not vocabulary_only and b"AMX_INT8 = 1" in native.llama_print_system_info():
            # See scripts/install_llama.py; the library that it builds has no AMX, a stock one may.
            log.warning("llama.cpp was built with AMX, which is not safe everywhere: using slower kernels")
            params.use_extra_bufts = False
        _recent_errors.clear()
        self._pointer = native.llama_model_load_from_file(str(path).encode(), params)
        if not self._pointer:
            reason = "; ".join(_recent_errors) or "the file is not a model that llama.cpp can read"
            raise ModelLoadError(f"cannot load {path}: {reason}", hint="Give the path of a valid .gguf file.")
        self.path = path
        self._vocab = native.llama_model_get_vocab(self._pointer)
        self.n_vocab = int(native.llama_vocab_n_tokens(self._vocab))
        self.pieces: list[bytes] = [self._piece(token) for token in range(self.n_vocab)]
        self.eos_ids = frozenset(
            token for token in range(self.n_vocab) if native.llama_vocab_is_eog(self._vocab, token)
        )
        bos = int(native.llama_vocab_bos(self._vocab))
        eos = int(native.llama_vocab_eos(self._vocab))
        self.bos_text = self._text(bos) if bos >= 0 else ""
        self.eos_text = self._text(eos) if eos >= 0 else ""
        self.bos_id = bos if bos >= 0 and native.llama_vocab_get_add_bos(self._vocab) else None
        control, user_defined = self._added_tokens()
        self.control_ids = frozenset(control)
        self.control_spellings = _longest_first(control.values())
        self.added_spellings = _longest_first([*control.values(), *user_defined.values()])

    @property
    def pointer(self) -> Any:
        if self._pointer is None:
            raise EngineFailed("the model has been closed")
        return self._pointer

    @cached_property
    def metadata(self) -> dict[str, str]:
        """The GGUF's key-value pairs, long values such as the template included."""
        count = native.llama_model_meta_count(self.pointer)
        pairs = {}
        for index in range(count):
            key = _read_text(
                lambda buffer, size, i=index: native.llama_model_meta_key_by_index(
                    self.pointer, i, buffer, size
                )
            )
            pairs[key] = _read_text(
                lambda buffer, size, i=index: native.llama_model_meta_val_str_by_index(
                    self.pointer, i, buffer, size
                )
            )
        return pairs

    @property
    def train_context(self) -> int:
        """Tokens of context the model was trained for. From the file: a vocabulary alone does not load it."""
        return int(self.metadata.get(f"{self.metadata.get('general.architecture')}.context_length", 0))

    @property
    def file_size(self) -> int:
        """Bytes of the model's file, or of all its files."""
        part = re.fullmatch(r"(.+)-\d{5}-of-(\d{5})\.gguf", self.path.name)
        if part is None:
            return self.path.stat().st_size
        return sum(p.stat().st_size for p in self.path.parent.glob(f"{part[1]}-?????-of-{part[2]}.gguf"))

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the F16 keys and values of one token, from the file's own numbers."""
        arch = self.metadata.get("general.architecture")

        def number(key: str, default: int = 0) -> int:
            text = self.metadata.get(f"{arch}.{key}", "")
            # Models whose layers differ list one value a layer.
            values = [int(word) for word in re.findall(r"\d+", text)]
            return max(values) if values else default

        heads = number("attention.head_count", 1)
        size = number("embedding_length") // max(1, heads)
        keys, values = number("attention.key_length", size), number("attention.value_length", size)
        return 2 * number("block_count") * number("attention.head_count_kv", heads) * (keys + values)

    @property
    def name(self) -> str:
        return self.metadata.get("general.name") or self.path.stem

    @property
    def chat_template(self) -> str | None:
        return self.metadata.get("tokenizer.chat_template")

    @property
    def system_info(self) -> str:
        """The instruction sets that the library was built for."""
        info: bytes = native.llama_print_system_info()
        return info.decode()

    @property
    def memory_can_be_cut(self) -> bool:
        """Whether KV entries can be copied and dropped token by token; recurrent layers cannot."""
        return not (
            native.llama_model_is_recurrent(self.pointer) or native.llama_model_is_hybrid(self.pointer)
        )

    @property
    def sampling_defaults(self) -> SamplingOverrides:
        """The generation settings that the file carries (general.sampling.*); absent ones are None."""

        def number(key: str) -> float | None:
            text = self.metadata.get(f"general.sampling.{key}")
            return None if text is None else float(text)

        top_k = number("top_k")
        return SamplingOverrides(
            temperature=number("temp"),
            top_p=number("top_p"),
            top_k=None if top_k is None else int(top_k),
            min_p=number("min_p"),
            repetition_penalty=number("penalty_repeat"),
        )

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        """Token ids of `text` by llama_tokenize. User-defined tokens match even with `parse_special` off."""
        data = text.encode("utf-8", "replace")
        size = len(data) + 16
        while True:
            buffer = (native.llama_token * size)()
            count = native.llama_tokenize(
                self._vocab, data, len(data), buffer, size, add_special, parse_special
            )
            if count >= 0:
                return list(buffer[:count])
            size = -count

    def close(self) -> None:
        """Free the weights. Every runner of this model must be closed before."""
        if self._pointer is not None:
            native.llama_model_free(self._pointer)
            self._pointer = None

    def _piece(self, token: int) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            count = native.llama_token_to_piece(self._vocab, token, buffer, size, 0, True)
            if count >= 0:
                return buffer.raw[:count]
            size = -count

    def _text(self, token: int) -> str:
        text: bytes | None = native.llama_vocab_get_text(self._vocab, token)
        return (text or b"").decode("utf-8", "replace")

    def _added_tokens(self) -> tuple[dict[int, str], dict[int, str]]:
        control, user_defined = {}, {}
        for token in range(self.n_vocab):
            attributes = native.llama_vocab_get_attr(self._vocab, token)
            if attributes & native.LLAMA_TOKEN_ATTR_CONTROL:
                control[token] = self._text(token)
            elif attributes & native.LLAMA_TOKEN_ATTR_USER_DEFINED:
                user_defined[token] = self._text(token)
        return control, user_defined


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
            reason = "; ".join(_recent_errors) or "not enough memory?"
            raise ModelLoadError(
                f"cannot create a context of {kv_cells} cells for {sequences} sequences: {reason}",
                hint="Lower --ctx-size or --parallel.",
            )
        self._memory = native.llama_get_memory(self._pointer)
        self._batch = _Batch(MAX_ROWS + 1)
        self._adapters = AdapterShelf(model.pointer, self._pointer, most=adapters, errors=_recent_errors)
        self._exactness = prove_exactness(self)
        self.exact_drafts = self._exactness.holds and self._exactness.with_drafts

    def execute(self, call: ModelCall) -> NDArray[np.float32]:
        self._adapters.use(call.adapters)
        pad = self._padding if call.exact else None
        wanted, outputs, padded = self._batch.fill(call, pad)
        status = native.llama_decode(self._pointer, self._batch.struct)
        if padded:
            native.llama_memory_seq_rm(self._memory, self._padding, -1, -1)
        if status == 1:
            raise KVExhausted
        if status != 0:
            raise EngineFailed(f"llama_decode returned {status}: {'; '.join(_recent_errors)}")
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

    def save(self, sequence: int) -> NDArray[np.uint8]:
        size = native.llama_state_seq_get_size(self._pointer, sequence)
        data = np.empty(size, np.uint8)
        native.llama_state_seq_get_data(self._pointer, _bytes_of(data), size, sequence)
        return data

    def restore(self, sequence: int, data: NDArray[np.uint8]) -> None:
        if native.llama_state_seq_set_data(self._pointer, _bytes_of(data), data.nbytes, sequence) == 0:
            raise EngineFailed(f"saved KV cannot be restored: {'; '.join(_recent_errors)}")

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


class _Batch:
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


def _bytes_of(data: NDArray[np.uint8]) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def _read_text(read: Any) -> str:
    """Call a C function that writes text into a buffer and returns the length it needs."""
    size = 256
    while True:
        buffer = ctypes.create_string_buffer(size)
        length = read(buffer, size)
        if length < 0:
            return ""
        if length < size:
            return buffer.raw[:length].decode("utf-8", "replace")
        size = length + 1


def _longest_first(spellings: Any) -> Sequence[str]:
    return sorted({s for s in spellings if s}, key=lambda s: (-len(s), s))
