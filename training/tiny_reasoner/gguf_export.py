"""Writes a trained directory as one GGUF file with F16 matrices.

`python -m training.tiny_reasoner.gguf_export models/tiny-reasoner model.gguf`
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
WHOLE_MODEL = {"embed_tokens": "token_embd", "norm": "output_norm"}


def tensor_name(name: str) -> str:
    """`model.layers.0.mlp.up_proj.weight` becomes `blk.0.ffn_up.weight`."""
    body = name.removeprefix("model.").removesuffix(".weight")
    if body in WHOLE_MODEL:
        return f"{WHOLE_MODEL[body]}.weight"
    _, layer, part = body.split(".", 2)
    return f"blk.{layer}.{NAMES[part]}.weight"


def _write_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    texts = {token_id: text for text, token_id in tokenizer["model"]["vocab"].items()}
    types = dict.fromkeys(texts, gguf.TokenType.NORMAL)
    for token in tokenizer["added_tokens"]:
        texts[token["id"]] = token["content"]
        special = token["special"]
        types[token["id"]] = gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
    ids = {text: token_id for token_id, text in texts.items()}
    merges = [
        " ".join(merge) if isinstance(merge, list) else merge
        for merge in tokenizer["model"]["merges"]
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([texts[token_id] for token_id in range(len(texts))])
    writer.add_token_types([types[token_id] for token_id in range(len(texts))])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(ids["<|im_end|>"])
    writer.add_eot_token_id(ids["<|im_end|>"])
    writer.add_pad_token_id(ids["<|endoftext|>"])
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_chat_template((folder / "chat_template.jinja").read_text(encoding="utf-8"))


def _write_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)


def export(folder: Path, target: Path, name: str = "tiny-reasoner") -> None:
    """Writes beside the target first, so that a reader never sees half a file."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    draft = target.with_suffix(".part")
    target.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(draft, "qwen3")
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_basename("tiny-reasoner")
    writer.add_size_label("0.5M")
    writer.add_license("apache-2.0")
    writer.add_description("A very small reasoning model: sums, tool calls and small talk.")
    writer.add_languages(["en"])
    writer.add_tags(["text-generation"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _write_shape(writer, config)
    _write_tokenizer(writer, folder)
    for key, weight in load_file(folder / "model.safetensors").items():
        if key == "lm_head.weight":
            continue  # tied to the embedding; llama.cpp reuses that one
        kind = np.float16 if weight.ndim > 1 else np.float32
        writer.add_tensor(tensor_name(key), weight.astype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(draft, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--name", default="tiny-reasoner")
    options = parser.parse_args()
    export(options.folder, options.target, options.name)


if __name__ == "__main__":
    main()
