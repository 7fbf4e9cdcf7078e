"""LoRA adapters as GGUF files, written by hand: the bundled one, and variations of it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

CHEERFUL = Path(__file__).resolve().parents[2] / "models" / "tiny-reasoner-cheerful-lora"
ALIGNMENT = 32
PARTS = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
Tensors = Mapping[str, NDArray[np.float32]]


def write_adapter(
    path: Path, change: Callable[[NDArray[np.float32]], NDArray[np.float32]] = lambda values: values
) -> Path:
    """The bundled adapter at `path`, every tensor changed by `change`."""
    config = json.loads((CHEERFUL / "adapter_config.json").read_text())
    tensors = {}
    for name, values in _read_safetensors(CHEERFUL / "adapter_model.safetensors").items():
        parts = name.split(".")
        layer, module, matrix = parts[4], parts[6], parts[7]
        kind = {"lora_A": "lora_a", "lora_B": "lora_b"}[matrix]
        tensors[f"blk.{layer}.{PARTS[module]}.weight.{kind}"] = change(values)
    path.write_bytes(_gguf(tensors, alpha=config["lora_alpha"]))
    return path


def shaken(seed: int) -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
    """A change that makes another adapter of the same size."""
    generator = np.random.default_rng(seed)
    return lambda values: (values * generator.normal(1.0, 2.0, values.shape)).astype(np.float32)


def _read_safetensors(path: Path) -> Tensors:
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    found = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            start, end = (8 + size + offset for offset in entry["data_offsets"])
            found[name] = np.frombuffer(data[start:end], np.float32).reshape(entry["shape"])
    return found


def _gguf(tensors: Tensors, *, alpha: float) -> bytes:
    facts = {"general.architecture": "qwen3", "general.type": "adapter", "adapter.type": "lora"}
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(facts) + 1)
    for key, value in facts.items():
        head += _text(key) + struct.pack("<I", 8) + _text(value)
    head += _text("adapter.lora.alpha") + struct.pack("<If", 6, alpha)
    body = b""
    for name, values in tensors.items():
        rows, columns = values.shape
        head += _text(name) + struct.pack("<IQQIQ", 2, columns, rows, 0, len(body))
        body += _padded(values.tobytes())
    return _padded(head) + body


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)
