"""The model's shape and its files."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from .tokenizer import VOCABULARY, wrap

CONTEXT = 4096


def new_model(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """A freshly initialised model of 541,760 parameters."""
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        max_position_embeddings=CONTEXT,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        eos_token_id=end,
        pad_token_id=pad,
        bos_token_id=None,
        use_cache=True,
        attn_implementation="sdpa",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = [end, pad]
    model.generation_config.pad_token_id = pad
    model.generation_config.bos_token_id = None
    return model


def round_to_half(model: torch.nn.Module) -> None:
    """Rounds weights of two dimensions to float16 in place, as the GGUF stores them."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(weight.half().float())


def save_model(model: Qwen3ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes a Hugging Face directory; the weights keep their float32 type."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config._from_model_config = False
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    wrap(tokenizer).save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["torch_dtype"] = config.pop("dtype", "float32")  # the older name is read everywhere
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_model(folder: Path) -> Qwen3ForCausalLM:
    """The model in float32, ready for inference."""
    model = Qwen3ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.eval()


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
