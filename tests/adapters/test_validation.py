"""Adapters that kiln does not serve are refused, and the refusal names what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kiln.adapters.config import parse_config
from kiln.adapters.names import MAX_NAME_BYTES, check_name, check_new_name
from kiln.adapters.registry import AdapterRegistry
from kiln.core.errors import AdapterNotFound, BodyTooLarge, InvalidAdapter, InvalidField

from .conftest import MakeRegistry
from .samples import CHEERFUL, CONFIG, WEIGHTS, cheerful, tensors_of, write

Q = "base_model.model.model.layers.0.self_attn.q_proj"


def config_with(**fields: Any) -> bytes:
    return json.dumps(json.loads((CHEERFUL / CONFIG).read_text("utf-8")) | fields).encode()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"peft_type": None}, "peft_type"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"target_parameters": ["w"]}, "target_parameters"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"use_something_new": True}, "use_something_new"),
        ({"r": 0}, "r must"),
        ({"r": 8.0}, "r must"),
        ({"r": True}, "r must"),
        ({"lora_alpha": "16"}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"use_rslora": "yes"}, "use_rslora"),
        ({"rank_pattern": [8]}, "rank_pattern"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern"),
        ({"rank_pattern": {"(a+)+$": 8}}, "regular expression"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern"),
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": [1]}, "target_modules"),
        ({"target_modules": None}, "target_modules"),
    ],
)
def test_a_configuration_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidAdapter, match=named):
        parse_config(config_with(**fields))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b'"x"', b"[" * 100_000, b"{" + b" " * (1 << 20)])
def test_a_configuration_that_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidAdapter, match="adapter_config.json"):
        parse_config(data)


@pytest.mark.parametrize(
    "fields", [{"modules_to_save": []}, {"use_dora": None}, {"init_lora_weights": "gaussian"}, {"new": 1}]
)
def test_what_changes_nothing_is_accepted(fields: dict[str, Any]) -> None:
    assert parse_config(config_with(**fields)).rank == 8


def test_patterns_match_names_and_their_ends() -> None:
    config = parse_config(
        config_with(rank_pattern={"layers.0.q_proj": 2, "q_proj": 4}, alpha_pattern={"^q_proj": 1})
    )
    assert config.rank_of("model.layers.0.q_proj") == 2
    assert config.rank_of("model.layers.10.q_proj") == 4
    assert config.rank_of("model.layers.0.xq_proj") == 8
    assert config.scaling_of("q_proj") == 1 / 4
    assert config.scaling_of("a.q_proj") == 16 / 4


def with_tensor(name: str, value: NDArray[Any]) -> dict[str, NDArray[Any]]:
    return tensors_of() | {name: value}


def without(name: str) -> dict[str, NDArray[Any]]:
    return {key: value for key, value in tensors_of().items() if key != name}


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        (with_tensor(f"{Q}.lora_A.weight", np.zeros((8, 64), np.float32)), "matrix of \\[128, 64\\]"),
        (with_tensor(f"{Q}.lora_B.weight", np.zeros((64, 8), np.float32)), "matrix of \\[64, 128\\]"),
        (with_tensor(f"{Q}.lora_A.weight", np.zeros((4, 128), np.float32)), "the rank"),
        (with_tensor(f"{Q}.lora_A.weight", np.zeros(128, np.float32)), "a matrix is expected"),
        (with_tensor(f"{Q}.lora_A.weight", np.zeros((8, 128), np.int64)), "the type I64"),
        (with_tensor(f"{Q}.lora_A.weight", np.full((8, 128), np.inf, np.float32)), "not finite"),
        (with_tensor(f"{Q}.lora_A.weight", np.full((8, 128), np.nan, np.float16)), "not finite"),
        (without(f"{Q}.lora_B.weight"), "has no lora_B"),
        (with_tensor(f"{Q}.lora_magnitude_vector", np.zeros(128, np.float32)), "DoRA"),
        (with_tensor("base_model.model.lm_head.weight", np.zeros((768, 128), np.float32)), "lm_head"),
        (
            with_tensor("base_model.model.model.embed_tokens.lora_embedding_A", np.zeros((8, 768))),
            "token embedding",
        ),
        ({}, "no tensor"),
    ],
)
def test_weights_are_refused_by_name(
    tensors: dict[str, NDArray[Any]], named: str, registry: AdapterRegistry, tmp_path: Path
) -> None:
    write(tmp_path / "saved" / "bad", tensors)
    with pytest.raises(InvalidAdapter, match=named):
        registry.revision("bad", "name")
    assert list(registry.storage.converted.iterdir()) == []


@pytest.mark.parametrize("module", ["model.layers.3.self_attn.q_proj", "model.embed_tokens", "lm_head", "x"])
def test_a_module_that_the_base_lacks_is_refused(
    module: str, registry: AdapterRegistry, tmp_path: Path
) -> None:
    name = f"base_model.model.{module}"
    tensors = {
        f"{name}.lora_A.weight": np.zeros((8, 128), np.float32),
        f"{name}.lora_B.weight": np.zeros((768, 8), np.float32),
    }
    write(tmp_path / "saved" / "bad", tensors, target_modules="all-linear")
    with pytest.raises(InvalidAdapter, match="has no module"):
        registry.revision("bad", "name")


def test_a_module_that_is_not_targeted_is_refused(registry: AdapterRegistry, tmp_path: Path) -> None:
    write(tmp_path / "saved" / "bad", tensors_of(), target_modules=["q_proj", "k_proj", "v_proj"])
    with pytest.raises(InvalidAdapter, match="o_proj.* is not among the target_modules"):
        registry.revision("bad", "name")


def test_a_scaling_that_overflows_is_refused(registry: AdapterRegistry, tmp_path: Path) -> None:
    write(tmp_path / "saved" / "bad", tensors_of(), lora_alpha=1e300)
    with pytest.raises(InvalidAdapter, match="not finite"):
        registry.revision("bad", "name")


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_cut_file_is_refused(size: int, registry: AdapterRegistry, tmp_path: Path) -> None:
    path = cheerful(tmp_path / "saved" / "bad") / WEIGHTS
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(InvalidAdapter, match="damaged or cut off"):
        registry.revision("bad", "name")


@pytest.mark.parametrize("missing", [CONFIG, WEIGHTS])
def test_a_missing_file_is_named(missing: str, registry: AdapterRegistry, tmp_path: Path) -> None:
    (cheerful(tmp_path / "saved" / "bad") / missing).unlink()
    with pytest.raises(InvalidAdapter, match=f"{missing} is missing"):
        registry.revision("bad", "name")


def test_a_pickle_is_never_loaded(registry: AdapterRegistry, tmp_path: Path) -> None:
    folder = cheerful(tmp_path / "saved" / "bad")
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(InvalidAdapter, match="adapter_model.bin is a pickle"):
        registry.revision("bad", "name")


def test_a_large_adapter_is_refused_unread(make_registry: MakeRegistry, tmp_path: Path) -> None:
    cheerful(tmp_path / "saved" / "large")
    with pytest.raises(BodyTooLarge, match="more than 1000 bytes"):
        make_registry(max_bytes=1000).revision("large", "name")


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "a\\b", "/etc", "C:\\x", "C:x", "a\0b", "a\nb", "\x7f", "\ud800", ".kiln"]
    + [" a", "a ", "é" * (MAX_NAME_BYTES // 2 + 1), "x" * 300],
)
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(InvalidField) as refused:
        check_name(name, "adapter")
    assert refused.value.param == "adapter"
    assert len(refused.value.message) < 300


@pytest.mark.parametrize("name", ["a", "math-v2", "user:7", "école", "a b", "x.y", "x" * 128])
def test_ordinary_names_are_accepted(name: str) -> None:
    assert check_new_name(name, "name") == name


def test_no_adapter_is_called_base(registry: AdapterRegistry, tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="without an adapter"):
        check_new_name("base", "name")
    cheerful(tmp_path / "saved" / "base")
    assert registry.entries() == []
    with pytest.raises(AdapterNotFound):
        registry.resolve([("base", 1.0)], "adapter")
