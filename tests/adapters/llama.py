"""A small Llama, in numpy as transformers computes it and as the GGUF file that llama.cpp computes.

The GGUF conversion reorders the rows of queries and keys, because the two pair the dimensions of the rotary
embedding differently. This model is written down apart from kiln, to hold the conversion of adapters against.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from .samples import MODEL

Matrix = NDArray[np.float64]

LAYERS, WIDTH, HEADS, KV_HEADS, FEED, VOCABULARY = 2, 64, 4, 2, 96, 768
HEAD = WIDTH // HEADS
THETA, EPSILON = 10000.0, 1e-5
_NAMES = {
    "self_attn.q_proj": ("attn_q", (WIDTH, WIDTH)),
    "self_attn.k_proj": ("attn_k", (KV_HEADS * HEAD, WIDTH)),
    "self_attn.v_proj": ("attn_v", (KV_HEADS * HEAD, WIDTH)),
    "self_attn.o_proj": ("attn_output", (WIDTH, WIDTH)),
    "mlp.gate_proj": ("ffn_gate", (FEED, WIDTH)),
    "mlp.up_proj": ("ffn_up", (FEED, WIDTH)),
    "mlp.down_proj": ("ffn_down", (WIDTH, FEED)),
}
SHAPES = {
    f"model.layers.{layer}.{name}": shape for layer in range(LAYERS) for name, (_, shape) in _NAMES.items()
}


def random_weights(seed: int) -> dict[str, Matrix]:
    """Matrices by their names in transformers, and the token embedding."""
    draws = np.random.default_rng(seed)
    weights = {name: draws.normal(0, 0.15, shape) for name, shape in SHAPES.items()}
    weights["model.embed_tokens"] = draws.normal(0, 0.5, (VOCABULARY, WIDTH))
    return {name: value.astype(np.float32).astype(np.float64) for name, value in weights.items()}


def logits(weights: Mapping[str, Matrix], tokens: Sequence[int]) -> Matrix:
    """The last token's logits; the output is tied to the embedding, norms have weight one."""
    x = weights["model.embed_tokens"][list(tokens)]
    angles = np.outer(np.arange(len(tokens)), THETA ** (-np.arange(0, HEAD, 2) / HEAD))
    angles = np.concatenate([angles, angles], axis=1)
    for layer in range(LAYERS):
        w = {name: weights[f"model.layers.{layer}.{name}"] for name in _NAMES}
        y = _norm(x)
        q = _rotate(_heads(y @ w["self_attn.q_proj"].T, HEADS), angles)
        k = _rotate(_heads(y @ w["self_attn.k_proj"].T, KV_HEADS), angles).repeat(HEADS // KV_HEADS, 0)
        v = _heads(y @ w["self_attn.v_proj"].T, KV_HEADS).repeat(HEADS // KV_HEADS, 0)
        scores = q @ k.swapaxes(1, 2) / np.sqrt(HEAD)
        scores = np.where(np.tri(len(tokens)) > 0, scores, -np.inf)
        chances = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (chances / chances.sum(-1, keepdims=True)) @ v
        x = x + mixed.swapaxes(0, 1).reshape(len(tokens), WIDTH) @ w["self_attn.o_proj"].T
        y = _norm(x)
        gate = y @ w["mlp.gate_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
    result: Matrix = _norm(x)[-1] @ weights["model.embed_tokens"].T
    return result


def write_gguf(weights: Mapping[str, Matrix], target: Path) -> Path:
    """The model as llama.cpp wants it, with the bundled model's tokenizer."""
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(THETA)
    writer.add_layer_norm_rms_eps(EPSILON)
    _copy_tokenizer(writer)
    ones = np.ones(WIDTH, np.float32)
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens"].astype(np.float32))
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(LAYERS):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", ones)
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", ones)
        for name, (ours, _) in _NAMES.items():
            matrix = weights[f"model.layers.{layer}.{name}"].astype(np.float32)
            if ours in ("attn_q", "attn_k"):
                heads = HEADS if ours == "attn_q" else KV_HEADS
                matrix = np.concatenate([_interleaved(rows) for rows in np.split(matrix, heads)])
            writer.add_tensor(f"blk.{layer}.{ours}.weight", np.ascontiguousarray(matrix))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _interleaved(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """One head's rows: the first of each half, then the second, and so on."""
    half = len(rows) // 2
    return np.stack([rows[i // 2 + half * (i % 2)] for i in range(len(rows))])


def _copy_tokenizer(writer: gguf.GGUFWriter) -> None:
    reader = gguf.GGUFReader(MODEL)

    def value(key: str) -> object:
        field = reader.get_field(f"tokenizer.ggml.{key}")
        assert field is not None
        return field.contents()

    writer.add_tokenizer_model(str(value("model")))
    writer.add_tokenizer_pre(str(value("pre")))
    writer.add_token_list(value("tokens"))  # type: ignore[arg-type]
    writer.add_token_types(value("token_type"))  # type: ignore[arg-type]
    writer.add_token_merges(value("merges"))  # type: ignore[arg-type]


def _norm(x: Matrix) -> Matrix:
    normed: Matrix = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)
    return normed


def _heads(x: Matrix, heads: int) -> Matrix:
    return x.reshape(len(x), heads, HEAD).swapaxes(0, 1)


def _rotate(x: Matrix, angles: Matrix) -> Matrix:
    """transformers pairs dimension i with i + half."""
    turned = np.concatenate([-x[..., HEAD // 2 :], x[..., : HEAD // 2]], axis=-1)
    rotated: Matrix = x * np.cos(angles) + turned * np.sin(angles)
    return rotated
