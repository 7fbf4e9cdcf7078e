"""A model file that llama.cpp has loaded: its weights, its vocabulary, and what it says of itself.

Native memory is freed by `close`, never by the garbage collector.
"""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as native

from kiln.backends.llamacpp.library import recent_errors, start_backend
from kiln.core.errors import EngineFailed, ModelLoadError
from kiln.core.sampling import SamplingOverrides

log = logging.getLogger("kiln.llamacpp")


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
        recent_errors.clear()
        self._pointer = native.llama_model_load_from_file(str(path).encode(), params)
        if not self._pointer:
            reason = "; ".join(recent_errors) or "the file is not a model that llama.cpp can read"
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
