"""`adapter_model.safetensors` of PEFT: the low-rank pairs of every module, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import safetensors
from numpy.typing import NDArray
from safetensors.numpy import save

from kiln.adapters.config import CONFIG_FILE, LoraConfig
from kiln.core.errors import InvalidAdapter
from kiln.core.text import shorten

WEIGHTS_FILE = "adapter_model.safetensors"

_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_EMBEDDING = re.compile(r".+\.lora_embedding_[AB]")
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Pair:
    """One module's factors in float32: `a` of shape (rank, in), `b` of shape (out, rank)."""

    a: Floats
    b: Floats


def parse_weights(data: bytes, config: LoraConfig) -> dict[str, Pair]:
    """The pairs by module name (`model.layers.0.self_attn.q_proj`). Raises InvalidAdapter."""
    try:
        tensors = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise InvalidAdapter(f"{WEIGHTS_FILE} is damaged or cut off: {error}") from None
    sides: dict[str, dict[str, Floats]] = {}
    for key, tensor in tensors:
        match = _KEY.fullmatch(key)
        if match is None:
            raise InvalidAdapter(f"{WEIGHTS_FILE}: {_stranger(key)}")
        sides.setdefault(match["module"], {})[match["side"]] = _to_floats(key, tensor)
    if not sides:
        raise InvalidAdapter(f"{WEIGHTS_FILE} holds no tensor")
    return {module: _to_pair(module, found, config) for module, found in sorted(sides.items())}


def weights_bytes(pairs: Mapping[str, Pair]) -> bytes:
    """The file of float32 pairs, as PEFT writes it."""
    tensors = {}
    for module, pair in pairs.items():
        prefix = f"base_model.model.{module}"
        tensors[f"{prefix}.lora_A.weight"] = np.ascontiguousarray(pair.a)
        tensors[f"{prefix}.lora_B.weight"] = np.ascontiguousarray(pair.b)
    return save(tensors, metadata={"format": "pt"})


def _stranger(key: str) -> str:
    name = shorten(key)
    if _EMBEDDING.fullmatch(key):
        return f"{name}: LoRA on the token embedding is not supported"
    if "lora_magnitude_vector" in key:
        return f"{name}: DoRA is not supported"
    return f"{name} is not a factor of a LoRA pair; other trained weights are not supported"


def _to_floats(key: str, tensor: Mapping[str, object]) -> Floats:
    dtype, shape, data = tensor["dtype"], tensor["shape"], tensor["data"]
    assert isinstance(dtype, str) and isinstance(shape, list) and isinstance(data, bytes | bytearray)
    if dtype not in _DTYPES:
        raise InvalidAdapter(
            f"{WEIGHTS_FILE}: {shorten(key)} has the type {dtype}, supported are F32, F16 and BF16"
        )
    if len(shape) != 2 or 0 in shape:
        raise InvalidAdapter(f"{WEIGHTS_FILE}: {shorten(key)} has the shape {shape}, a matrix is expected")
    raw = np.frombuffer(data, _DTYPES[dtype]).reshape(shape)
    if dtype == "BF16":
        # A bfloat16 is the upper half of a float32.
        values = (raw.astype(np.uint32) << 16).view(np.float32)
    else:
        values = raw.astype(np.float32)
    if not np.isfinite(values).all():
        raise InvalidAdapter(f"{WEIGHTS_FILE}: {shorten(key)} holds values that are not finite")
    return values


def _to_pair(module: str, sides: Mapping[str, Floats], config: LoraConfig) -> Pair:
    name = shorten(module)
    missing = [side for side in "AB" if side not in sides]
    if missing:
        raise InvalidAdapter(f"{WEIGHTS_FILE}: {name} has no lora_{missing[0]}")
    if not config.is_target(module):
        raise InvalidAdapter(f"{WEIGHTS_FILE}: {name} is not among the target_modules of {CONFIG_FILE}")
    pair, rank = Pair(sides["A"], sides["B"]), config.rank_of(module)
    if pair.a.shape[0] != rank or pair.b.shape[1] != rank:
        raise InvalidAdapter(
            f"{WEIGHTS_FILE}: {name} has lora_A {list(pair.a.shape)} and lora_B {list(pair.b.shape)},"
            f" the rank in {CONFIG_FILE} is {rank}"
        )
    return pair
