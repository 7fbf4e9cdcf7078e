"""Adapters to test with: the bundled one, and changed copies of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from kiln.adapters.config import LoraConfig
from kiln.adapters.revision import read_pairs as pairs_of
from kiln.adapters.weights import Pair

ROOT = Path(__file__).parents[2]
CHEERFUL = ROOT / "models" / "tiny-reasoner-cheerful-lora"
MODEL = Path(str(files("kiln"))) / "models" / "tiny-reasoner-f16.gguf"
REFERENCE = json.loads((ROOT / "tests" / "fixtures" / "reference-adapter.json").read_text("utf-8"))

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

Tensors = dict[str, NDArray[Any]]


def cheerful(target: Path) -> Path:
    """A copy of the bundled adapter."""
    shutil.copytree(CHEERFUL, target)
    return target


def tensors_of(folder: Path = CHEERFUL) -> Tensors:
    return dict(load_file(folder / WEIGHTS))


def write(target: Path, tensors: Mapping[str, NDArray[Any]], **config: Any) -> Path:
    """An adapter of these tensors, with the bundled one's configuration but for the given fields."""
    target.mkdir(parents=True, exist_ok=True)
    fields = json.loads((CHEERFUL / CONFIG).read_text("utf-8")) | config
    (target / CONFIG).write_text(json.dumps(fields), "utf-8")
    save_file(dict(tensors), target / WEIGHTS)
    return target


def read_pairs(folder: Path) -> tuple[LoraConfig, dict[str, Pair]]:
    """What kiln reads out of a folder."""
    return pairs_of((folder / CONFIG).read_bytes(), (folder / WEIGHTS).read_bytes())


def changed(target: Path, change: Callable[[str, NDArray[Any]], NDArray[Any]], **config: Any) -> Path:
    """The bundled adapter with every tensor changed."""
    return write(target, {name: change(name, value) for name, value in tensors_of().items()}, **config)


def scaled(target: Path, factor: float) -> Path:
    """The bundled adapter with its delta times `factor`."""
    return changed(target, lambda name, value: value * np.float32(factor) if ".lora_B." in name else value)


def deltas(folder: Path) -> dict[str, NDArray[np.float64]]:
    """What an adapter adds to each module's matrix, straight from PEFT's definition, in float64."""
    config = json.loads((folder / CONFIG).read_text("utf-8"))
    tensors = tensors_of(folder)
    found = {}
    for name, a in tensors.items():
        if ".lora_A." not in name:
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b = tensors[name.replace(".lora_A.", ".lora_B.")]
        rank = a.shape[0]
        alpha = config["alpha_pattern"].get(module, config["lora_alpha"])
        factor = alpha / np.sqrt(rank) if config["use_rslora"] else alpha / rank
        found[module] = factor * (b.astype(np.float64) @ a.astype(np.float64))
    return found
