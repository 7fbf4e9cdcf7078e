"""Adapters of a Llama, where queries and keys are reordered: llama.cpp against transformers' arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from kiln.adapters.base import read_base
from kiln.adapters.convert import convert

from .llama import SHAPES, Matrix, logits, random_weights, write_gguf
from .native import NativeModel
from .samples import deltas, read_pairs, write

PROMPT = [3, 141, 59, 26, 535, 8, 97, 93, 238, 46, 264, 33, 83, 279, 50, 288]
RANK = 4


@pytest.fixture(scope="module")
def weights() -> dict[str, Matrix]:
    return random_weights(0)


def adapter_of(modules: list[str], target: Path) -> Path:
    draws = np.random.default_rng(1)
    tensors = {}
    for module in modules:
        out, width = SHAPES[module]
        name = f"base_model.model.{module}"
        tensors[f"{name}.lora_A.weight"] = draws.normal(0, 0.3, (RANK, width)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = draws.normal(0, 0.3, (out, RANK)).astype(np.float32)
    targets = sorted({module.rpartition(".")[2] for module in modules})
    return write(target, tensors, r=RANK, lora_alpha=6, target_modules=targets)


def added(weights: Mapping[str, Matrix], folder: Path, scale: float) -> dict[str, Matrix]:
    """The model with an adapter's delta in its matrices."""
    return {**weights, **{name: weights[name] + scale * delta for name, delta in deltas(folder).items()}}


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj", "o_proj", "mlp", ""])
def test_logits_are_those_of_the_merged_model(part: str, weights: dict[str, Matrix], tmp_path: Path) -> None:
    modules = [module for module in SHAPES if part in module]
    folder = adapter_of(modules, tmp_path / "adapter")
    path = write_gguf(weights, tmp_path / "model.gguf")
    convert(*read_pairs(folder), read_base(path), tmp_path / "adapter.gguf")
    base, adapted = logits(weights, PROMPT), logits(added(weights, folder, 0.5), PROMPT)
    moved = np.abs(adapted - base).max()
    native = NativeModel(path)
    try:
        assert np.abs(native.logits(PROMPT) - base).max() < moved / 50
        native.use((tmp_path / "adapter.gguf", 0.5))
        assert np.abs(native.logits(PROMPT) - adapted).max() < moved / 50
    finally:
        native.close()
