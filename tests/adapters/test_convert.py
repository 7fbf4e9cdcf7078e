"""What llama.cpp computes with a converted adapter is what PEFT computes with the original."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from kiln.adapters.base import BaseModel, read_base, reorder_rows
from kiln.adapters.convert import convert
from kiln.core.errors import InvalidAdapter

from .native import NativeModel
from .samples import CHEERFUL, REFERENCE, changed, deltas, read_pairs, tensors_of, write

CASES = REFERENCE["cases"]


def converted(folder: Path, base: BaseModel, target: Path) -> Path:
    config, pairs = read_pairs(folder)
    convert(config, pairs, base, target)
    return target


def converted_deltas(path: Path) -> dict[str, NDArray[np.float64]]:
    """What a converted file adds to each weight of the GGUF model."""
    tensors = {t.name: np.array(t.data, np.float64) for t in gguf.GGUFReader(path).tensors}
    return {
        name.removesuffix(".lora_a"): tensors[name.removesuffix("a") + "b"] @ a
        for name, a in tensors.items()
        if name.endswith(".lora_a")
    }


def test_greedy_output_is_that_of_peft(base: BaseModel, native: NativeModel, tmp_path: Path) -> None:
    assert len(CASES) == 30
    native.use((converted(CHEERFUL, base, tmp_path / "a.gguf"), 1.0))
    same = [native.generate(c["prompt_ids"], REFERENCE["max_tokens"]) == c["output_ids"] for c in CASES]
    assert all(same)


def test_a_conversion_is_no_news(base: BaseModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        converted(CHEERFUL, base, tmp_path / "a.gguf")
    assert [record.message for record in caplog.records] == []


def test_logits_are_those_of_peft(base: BaseModel, native: NativeModel, tmp_path: Path) -> None:
    native.use((converted(CHEERFUL, base, tmp_path / "a.gguf"), 1.0))
    for row in REFERENCE["logits"]:
        expected = np.array(row["adapter"])
        moved = np.abs(expected - np.array(row["base"])).max()
        # llama.cpp keeps keys and values in float16, which moves the base model's logits as much.
        off = np.abs(native.logits(row["prompt_ids"]) - expected).max()
        assert off < 0.02
        assert off < moved / 20


@pytest.mark.parametrize(
    ("change", "config"),
    [
        (lambda name, value: value, {}),
        (lambda name, value: value, {"use_rslora": True}),
        (lambda name, value: value, {"lora_alpha": 0.5}),
        (lambda name, value: value, {"alpha_pattern": {"model.layers.1.self_attn.q_proj": 3}}),
        (lambda name, value: value.astype(np.float16), {}),
    ],
    ids=["plain", "rslora", "alpha", "alpha of a module", "float16"],
)
def test_the_delta_is_that_of_the_definition(
    change: Any, config: dict[str, Any], base: BaseModel, tmp_path: Path
) -> None:
    folder = changed(tmp_path / "saved", change, **config)
    found = converted_deltas(converted(folder, base, tmp_path / "a.gguf"))
    expected = deltas(folder)
    assert len(found) == len(expected) == 12
    for layer in range(3):
        for theirs, ours in (("q_proj", "attn_q"), ("k_proj", "attn_k"), ("o_proj", "attn_output")):
            np.testing.assert_allclose(
                found[f"blk.{layer}.{ours}.weight"],
                expected[f"model.layers.{layer}.self_attn.{theirs}"],
                rtol=1e-5,
                atol=1e-7,
            )


def test_ranks_may_differ_by_module(base: BaseModel, tmp_path: Path) -> None:
    def cut(name: str, value: NDArray[Any]) -> NDArray[Any]:
        if "v_proj" not in name:
            return value
        return np.ascontiguousarray(value[:3] if ".lora_A." in name else value[:, :3])

    folder = changed(tmp_path / "saved", cut, rank_pattern={"v_proj": 3})
    found = converted_deltas(converted(folder, base, tmp_path / "a.gguf"))
    expected = deltas(folder)["model.layers.2.self_attn.v_proj"]
    np.testing.assert_allclose(found["blk.2.attn_v.weight"], expected, rtol=1e-5, atol=1e-7)


def test_bfloat16_is_widened_exactly(base: BaseModel, tmp_path: Path) -> None:
    # bfloat16 has no numpy type: round the values to it, and write the upper halves with their own header.
    rounded = {n: (v.view(np.uint32) & 0xFFFF0000).view(np.float32) for n, v in tensors_of().items()}
    write(tmp_path / "float32", rounded)
    folder = write(tmp_path / "bfloat16", rounded)
    header: dict[str, Any] = {}
    data = b""
    for name, value in rounded.items():
        half = (value.view(np.uint32) >> 16).astype("<u2").tobytes()
        place = [len(data), len(data) + len(half)]
        header[name] = {"dtype": "BF16", "shape": value.shape, "data_offsets": place}
        data += half
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    first = converted(tmp_path / "float32", base, tmp_path / "a.gguf").read_bytes()
    assert converted(folder, base, tmp_path / "b.gguf").read_bytes() == first


def test_rows_of_rotary_projections_are_reordered_for_llama() -> None:
    heads, size, columns = 3, 8, 2
    matrix = np.arange(heads * size * columns, dtype=np.float32).reshape(-1, columns)
    found = reorder_rows(matrix, heads)
    for head in range(heads):
        for half in range(2):
            for i in range(size // 2):
                source = head * size + half * size // 2 + i
                np.testing.assert_array_equal(found[head * size + 2 * i + half], matrix[source])


def test_llama_reorders_queries_and_keys_only(base: BaseModel, tmp_path: Path) -> None:
    llama = BaseModel("llama", base.layers, base.heads, base.kv_heads, base.shapes)
    plain = converted_deltas(converted(CHEERFUL, base, tmp_path / "a.gguf"))
    other = converted_deltas(converted(CHEERFUL, llama, tmp_path / "b.gguf"))
    for name, delta in plain.items():
        heads = {"attn_q": base.heads, "attn_k": base.kv_heads}.get(name.split(".")[2])
        expected = delta if heads is None else reorder_rows(delta.astype(np.float32), heads)
        np.testing.assert_allclose(other[name], expected, rtol=1e-5)


def test_the_base_is_read_from_its_file(base: BaseModel) -> None:
    assert (base.architecture, base.layers, base.heads, base.kv_heads) == ("qwen3", 3, 4, 2)
    assert base.shapes["blk.0.attn_k"] == (64, 128)
    assert base.shapes["token_embd"] == (768, 128)


def test_an_architecture_that_is_not_known_is_refused(base: BaseModel, tmp_path: Path) -> None:
    other = BaseModel("mamba", base.layers, base.heads, base.kv_heads, base.shapes)
    with pytest.raises(InvalidAdapter, match="architecture mamba"):
        converted(CHEERFUL, other, tmp_path / "a.gguf")


def test_a_model_in_parts_is_read_whole(tmp_path: Path) -> None:
    for index, tensor in enumerate(("blk.0.attn_q.weight", "blk.1.attn_q.weight"), start=1):
        writer = gguf.GGUFWriter(tmp_path / f"model-{index:05d}-of-00002.gguf", "qwen3")
        writer.add_block_count(2)
        writer.add_head_count(4)
        writer.add_tensor(tensor, np.zeros((8, 4), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    found = read_base(tmp_path / "model-00001-of-00002.gguf")
    assert found.shapes == {"blk.0.attn_q": (8, 4), "blk.1.attn_q": (8, 4)}
    assert found.kv_heads == 4
