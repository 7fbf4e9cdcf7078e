"""Merges, held against the arithmetic on the deltas themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from numpy.typing import NDArray

from kiln.adapters.base import BaseModel
from kiln.adapters.config import parse_config
from kiln.adapters.convert import convert
from kiln.adapters.merge import CannotMerge, Merged, Source, low_rank, merge, ties
from kiln.adapters.weights import Pair, weights_bytes
from kiln.wire.adapters import MergeMethod

from .samples import CHEERFUL, CONFIG, WEIGHTS, Tensors, changed, deltas, read_pairs, tensors_of, write

Matrix = NDArray[np.float64]


def another(target: Path, seed: int, rank: int = 4) -> Path:
    """A random adapter of another rank, without the values' modules, scaled by alpha / sqrt(r)."""
    draws = np.random.default_rng(seed)
    tensors: Tensors = {}
    for name, value in tensors_of().items():
        shape = (rank, value.shape[1]) if ".lora_A." in name else (value.shape[0], rank)
        if "v_proj" not in name:
            tensors[name] = draws.normal(0, 0.05, shape).astype(np.float32)
    return write(target, tensors, r=rank, lora_alpha=3, use_rslora=True)


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    return [CHEERFUL, another(tmp_path / "one", 1), another(tmp_path / "two", 2)]


def merged(tmp_path: Path, parts: list[Path], weights: list[float], method: Any, **options: Any) -> Merged:
    options = {"rank": None, "density": 0.2} | options
    sources = [Source(*read_pairs(part), weight) for part, weight in zip(parts, weights, strict=True)]
    result = merge(sources, method, **options)
    target = tmp_path / "merged"
    target.mkdir(exist_ok=True)
    (target / CONFIG).write_bytes(result.config)
    (target / WEIGHTS).write_bytes(weights_bytes(result.pairs))
    return result


def expected_sum(parts: list[Path], weights: list[float]) -> dict[str, Matrix]:
    """The weighted sum of deltas, module by module; a module that is not there adds nothing."""
    total: dict[str, Matrix] = {}
    for part, weight in zip(parts, weights, strict=True):
        for module, delta in deltas(part).items():
            total[module] = total.get(module, np.zeros_like(delta)) + weight * delta
    return total


def expected_ties(all_deltas: list[Matrix], weights: list[float], density: float) -> Matrix:
    """TIES entry by entry, in plain Python."""
    trimmed = []
    for delta in all_deltas:
        kept = int(np.ceil(density * delta.size))
        limit = np.sort(np.abs(delta), axis=None)[delta.size - kept]
        trimmed.append(np.where(np.abs(delta) >= limit, delta, 0.0))
    result = np.zeros_like(all_deltas[0])
    for place in np.ndindex(result.shape):
        values = [weight * delta[place] for delta, weight in zip(trimmed, weights, strict=True)]
        sign = np.sign(sum(values))
        pairs = [(v, abs(w)) for v, w in zip(values, weights, strict=True)]
        agreeing = [(v, w) for v, w in pairs if v != 0 and np.sign(v) == sign]
        if agreeing:
            result[place] = sum(v for v, _ in agreeing) / sum(w for _, w in agreeing)
    return result


def truncated(delta: Matrix, rank: int) -> Matrix:
    u, values, v = np.linalg.svd(delta)
    best: Matrix = (u[:, :rank] * values[:rank]) @ v[:rank]
    return best


def close(found: Matrix, expected: Matrix) -> None:
    assert np.abs(found - expected).max() < 1e-5 * max(1.0, np.abs(expected).max())


def test_concat_is_the_sum(parts: list[Path], tmp_path: Path) -> None:
    weights = [1.0, -0.5, 2.0]
    result = merged(tmp_path, parts, weights, "concat")
    found, expected = deltas(tmp_path / "merged"), expected_sum(parts, weights)
    assert found.keys() == expected.keys()
    for module in expected:
        close(found[module], expected[module])
    assert result.relative_error == 0
    assert result.rank == 8 + 4 + 4
    # Only one of the three adapts the values.
    assert json.loads(result.config)["rank_pattern"] == {
        f"model.layers.{layer}.self_attn.v_proj": 8 for layer in range(3)
    }


def test_an_average_with_room_is_exact(parts: list[Path], tmp_path: Path) -> None:
    weights = [1.0, 2.0, 5.0]
    result = merged(tmp_path, parts, weights, "weighted_average", rank=16)
    found, expected = deltas(tmp_path / "merged"), expected_sum(parts, [w / 8 for w in weights])
    for module in expected:
        close(found[module], expected[module])
    assert result.relative_error < 1e-6


def test_an_average_without_room_is_the_best_of_its_rank(parts: list[Path], tmp_path: Path) -> None:
    weights = [1.0, 2.0, 5.0]
    result = merged(tmp_path, parts, weights, "weighted_average", rank=3)
    found, expected = deltas(tmp_path / "merged"), expected_sum(parts, [w / 8 for w in weights])
    lost = whole = 0.0
    for module, delta in expected.items():
        close(found[module], truncated(delta, 3))
        lost += float(np.linalg.norm(delta - truncated(delta, 3)) ** 2)
        whole += float(np.linalg.norm(delta) ** 2)
    assert result.relative_error == pytest.approx(np.sqrt(lost / whole), rel=1e-6)
    assert result.rank == 3


def test_the_rank_is_that_of_the_largest_adapter(parts: list[Path], tmp_path: Path) -> None:
    assert merged(tmp_path, parts, [1, 1, 1], "weighted_average").rank == 8


@pytest.mark.parametrize("density", [0.2, 0.5, 1.0])
def test_ties_is_trimming_election_and_agreement(density: float, parts: list[Path], tmp_path: Path) -> None:
    weights = [1.0, 0.5, 0.7]
    merged(tmp_path, parts, weights, "ties", rank=64, density=density)
    found = deltas(tmp_path / "merged")
    module = "model.layers.1.self_attn.k_proj"  # 64 x 128: rank 64 holds all of it
    expected = expected_ties([deltas(part)[module] for part in parts], weights, density)
    assert 0 < np.count_nonzero(expected)
    close(found[module], expected)
    close(ties([deltas(part)[module] for part in parts], weights, density), expected)


def test_ties_is_brought_to_a_rank(parts: list[Path], tmp_path: Path) -> None:
    result = merged(tmp_path, parts, [1.0, 1.0, 1.0], "ties", rank=5)
    module = "model.layers.0.self_attn.q_proj"
    dense = expected_ties([deltas(part)[module] for part in parts], [1.0, 1.0, 1.0], 0.2)
    close(deltas(tmp_path / "merged")[module], truncated(dense, 5))
    assert 0.1 < result.relative_error < 1


def test_large_matrices_are_nearly_as_well_approximated() -> None:
    draws = np.random.default_rng(0)
    # A spectrum that falls slowly, as that of a TIES merge does.
    spectrum = 1 / np.sqrt(np.arange(1, 1041))
    u = np.linalg.qr(draws.normal(size=(1040, 1040)))[0]
    v = np.linalg.qr(draws.normal(size=(1040, 1040)))[0]
    delta = (u * spectrum) @ v
    factors, missed, norm = low_rank(delta, 8)
    best = float(np.sqrt((spectrum[8:] ** 2).sum()))
    assert missed == pytest.approx(float(np.linalg.norm(delta - factors.b @ factors.a)), rel=1e-6)
    assert best <= missed < best * 1.001
    assert norm == pytest.approx(float(np.linalg.norm(delta)))


@pytest.mark.parametrize("method", get_args(MergeMethod))
def test_a_merge_is_served_like_any_adapter(
    method: Any, parts: list[Path], base: BaseModel, tmp_path: Path
) -> None:
    merged(tmp_path, parts, [1.0, 0.5, 0.5], method)
    convert(*read_pairs(tmp_path / "merged"), base, tmp_path / "m.gguf")


def test_an_adapter_merged_with_itself_is_itself(tmp_path: Path) -> None:
    for method in get_args(MergeMethod):
        merged(tmp_path, [CHEERFUL, CHEERFUL], [0.5, 0.5], method, density=1.0)
        for module, delta in deltas(CHEERFUL).items():
            close(deltas(tmp_path / "merged")[module], delta)


def test_a_concatenation_has_a_largest_rank(tmp_path: Path) -> None:
    big = changed(
        tmp_path / "big",
        lambda name, value: np.zeros(
            (2048, value.shape[1]) if ".lora_A." in name else (value.shape[0], 2048), np.float32
        ),
        r=2048,
    )
    with pytest.raises(CannotMerge, match="6144"):
        merged(tmp_path, [big, big, big], [1.0, 1.0, 1.0], "concat")


@pytest.mark.parametrize("weight", [1e300, 1e39])
def test_weights_that_overflow(weight: float, parts: list[Path], tmp_path: Path) -> None:
    with pytest.raises(CannotMerge, match="too large"):
        merged(tmp_path, parts, [weight, -weight / 2, 1.0], "concat")
    with pytest.raises(CannotMerge, match="too large"):
        merged(tmp_path, parts, [weight, -weight, 1.0], "weighted_average")


def test_ties_averages_by_weight_whatever_its_size(parts: list[Path], tmp_path: Path) -> None:
    small = merged(tmp_path, parts, [1.0, 0.5, 0.25], "ties")
    large = merged(tmp_path, parts, [2.0**100, 2.0**99, 2.0**98], "ties")
    for module, pair in small.pairs.items():
        np.testing.assert_array_equal(pair.b, large.pairs[module].b)


def test_ranks_that_add_up_to_too_much_cost_no_work() -> None:
    config = parse_config(b'{"peft_type": "LORA", "r": 3000, "lora_alpha": 1, "target_modules": ["q"]}')
    # Any arithmetic on these would find that they get too large.
    pair = Pair(np.full((3000, 2), 1e38, np.float32), np.full((2, 3000), 1e38, np.float32))
    with pytest.raises(CannotMerge, match="rank 6000, at most 4096"):
        merge([Source(config, {"q": pair}, 1.0)] * 2, "concat", rank=None, density=0.2)
