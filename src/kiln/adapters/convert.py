"""From PEFT to the GGUF file of a LoRA that llama.cpp loads.

The scaling of a module (alpha / r, alpha / sqrt(r) or one of its own) is multiplied into B, so that a
scale of 1 at run time is the adapter as it was trained. Values are float32, which loses nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kiln.adapters.base import BaseModel
from kiln.adapters.config import LoraConfig
from kiln.adapters.weights import Floats, Pair
from kiln.core.errors import InvalidAdapter

# Part of a converted file's name: raise it when the conversion changes.
FORMAT = 1


def convert(config: LoraConfig, pairs: Mapping[str, Pair], base: BaseModel, target: Path) -> None:
    """Write the adapter of `pairs` for `base` to `target`. Raises InvalidAdapter where it does not fit."""
    placed = {}
    for module, pair in pairs.items():
        name, fitted = base.place(module, pair)
        if name in placed:
            raise InvalidAdapter(f"two modules of the adapter are {name} of the served model")
        placed[name] = Pair(fitted.a, _scaled(fitted.b, config.scaling_of(module)))
    # Imported late: see base.py.
    import gguf

    # It tells every file that it writes at level info.
    logging.getLogger("gguf").setLevel(logging.WARNING)
    writer = gguf.GGUFWriter(target, base.architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    # Zero tells llama.cpp to take the pair as it is.
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 0.0)
    for name, pair in sorted(placed.items()):
        writer.add_tensor(f"{name}.weight.lora_a", np.ascontiguousarray(pair.a))
        writer.add_tensor(f"{name}.weight.lora_b", np.ascontiguousarray(pair.b))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _scaled(matrix: Floats, factor: float) -> Floats:
    with np.errstate(over="ignore"):
        scaled: Floats = (matrix * np.float64(factor)).astype(np.float32)
    if not np.isfinite(scaled).all():
        raise InvalidAdapter(f"the weights times their scaling of {factor:g} are not finite")
    return scaled
