"""The base model as an adapter sees it: names and shapes of its weights, out of the GGUF file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kiln.adapters.weights import Floats, Pair
from kiln.core.errors import InvalidAdapter
from kiln.core.text import shorten

if TYPE_CHECKING:
    import gguf

# Architectures whose projections stand in the GGUF file as in the Hugging Face checkpoint.
_PLAIN = frozenset(
    "qwen2 qwen2moe qwen3 qwen3moe gemma gemma2 gemma3 phi3 olmo2 command-r cohere2 starcoder2".split()
)
# Those whose query and key rows the GGUF conversion reorders for its rotary embedding.
_REORDERED = frozenset("llama smollm3 granite".split())
_PART = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True)
class BaseModel:
    """`shapes` are (out, in) of every matrix, by the GGUF name without `.weight`."""

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    shapes: Mapping[str, tuple[int, int]]

    @cached_property
    def fingerprint(self) -> str:
        """Models with the same one take the same converted adapters."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @cached_property
    def _names(self) -> gguf.TensorNameMap:
        # Imported late, here and elsewhere: it takes a moment, and most commands have no use for it.
        import gguf

        architecture = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture)
        return gguf.get_tensor_name_map(architecture, self.layers)

    def place(self, module: str, pair: Pair) -> tuple[str, Pair]:
        """The GGUF name of a module's weight, and the pair as that weight needs it.

        Raises InvalidAdapter where the base has no such weight or one of another shape.
        """
        if self.architecture not in _PLAIN | _REORDERED:
            raise InvalidAdapter(f"adapters are not supported for the architecture {self.architecture}")
        name = self._names.get_name(module)
        shape = None if name is None else self.shapes.get(name)
        if name is None or shape is None or name == "token_embd":
            raise InvalidAdapter(f"the served model has no module {shorten(module)} that can be adapted")
        ours = (pair.b.shape[0], pair.a.shape[1])
        if ours != shape:
            raise InvalidAdapter(
                f"{shorten(module)} is adapted as a matrix of {list(ours)},"
                f" the served model's is {list(shape)}",
                hint="The adapter was trained on another base model.",
            )
        if self.architecture in _REORDERED and name.endswith((".attn_q", ".attn_k")):
            heads = self.heads if name.endswith(".attn_q") else self.kv_heads
            pair = Pair(pair.a, reorder_rows(pair.b, heads))
        return name, pair


def reorder_rows(matrix: Floats, heads: int) -> Floats:
    """Rows of each head from two halves to pairs, as llama.cpp's rotary embedding takes them."""
    rows, columns = matrix.shape
    halves = matrix.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)


def read_base(path: Path) -> BaseModel:
    """Read names and shapes from a GGUF file, all parts of it. Takes seconds for a large vocabulary."""
    import gguf

    reader = gguf.GGUFReader(path)
    architecture = _text(reader, "general.architecture")
    heads = _number(reader, f"{architecture}.attention.head_count")
    kv_heads = _number(reader, f"{architecture}.attention.head_count_kv")
    shapes: dict[str, tuple[int, int]] = {}
    for part in _parts(path):
        for tensor in (reader if part == path else gguf.GGUFReader(part)).tensors:
            size: NDArray[np.uint32] = tensor.shape
            if len(size) == 2 and tensor.name.endswith(".weight"):
                shapes[tensor.name.removesuffix(".weight")] = (int(size[1]), int(size[0]))
    return BaseModel(
        architecture,
        layers=_number(reader, f"{architecture}.block_count") or 0,
        heads=heads or 1,
        kv_heads=kv_heads or heads or 1,
        shapes=shapes,
    )


def _parts(path: Path) -> list[Path]:
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    return [
        path.with_name(f"{match['stem']}-{index:05d}-of-{count:05d}.gguf") for index in range(1, count + 1)
    ]


def _text(reader: gguf.GGUFReader, key: str) -> str:
    field = reader.get_field(key)
    return "" if field is None else str(field.contents())


def _number(reader: gguf.GGUFReader, key: str) -> int | None:
    """A number, or None where it is missing or differs by layer."""
    field = reader.get_field(key)
    value = None if field is None else field.contents()
    return value if isinstance(value, int) else None
