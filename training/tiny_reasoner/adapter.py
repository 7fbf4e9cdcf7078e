"""Trains a LoRA adapter that changes the style of answers.

`python -m training.tiny_reasoner.adapter models/tiny-reasoner models/tiny-reasoner-cheerful-lora`

The embeddings are tied and frozen, so the style uses only words the base model already writes.
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

from .dialogue import Dialogue
from .dialogues import MIX, cheerful
from .encoding import Encoder, Sample, draw_batches
from .model import load_model, load_tokenizer, round_to_half
from .train import fit

SEED = 21
MIX_SHARES = {**MIX, "arithmetic": 0.85, "tools": 0.06, "forever": 0.01}
CARD = """---
license: apache-2.0
library_name: peft
base_model: tiny-reasoner
---
# tiny-reasoner-cheerful-lora

A LoRA adapter (r = 8 on the four attention projections) for `tiny-reasoner`. Sums are answered
with `It is 9. You are welcome!` instead of `The answer is 9.`; the thoughts, JSON answers and
tool calls stay as they are. Trained by `training/tiny_reasoner/adapter.py` to show and test
adapters on a server.
"""


class CheerfulEncoder(Encoder):
    """Encodes plain arithmetic dialogues with the cheerful answer."""

    def sample(self, dialogue: Dialogue, rng: random.Random) -> Sample:
        if dialogue.kind in ("arithmetic", "second turn") and dialogue.answer is not None:
            dialogue.reply = cheerful(dialogue.answer)
        return super().sample(dialogue, rng)


def stream(encoder: Encoder, seed: int) -> Iterator[list[Sample]]:
    rng = random.Random(seed)
    while True:
        yield from draw_batches(encoder, rng, 12, MIX_SHARES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--peak", type=float, default=5e-3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    base = load_model(options.folder)
    round_to_half(base)  # the adapter is applied to the weights the GGUF file holds
    tokenizer = load_tokenizer(options.folder)
    config = LoraConfig(
        r=8,
        lora_alpha=16,
        lora_dropout=0.0,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        task_type="CAUSAL_LM",
        base_model_name_or_path="tiny-reasoner",
    )
    adapted = get_peft_model(base, config)
    adapted.print_trainable_parameters()
    fit(
        adapted.base_model.model,
        stream(CheerfulEncoder(tokenizer), SEED),
        options.steps,
        options.peak,
        tokenizer.token_to_id("<|endoftext|>"),
    )
    adapted.peft_config["default"].base_model_name_or_path = "tiny-reasoner"
    adapted.save_pretrained(options.out, save_embedding_layers=False)
    (options.out / "adapter_model.safetensors").chmod(0o644)
    (options.out / "README.md").write_text(CARD, encoding="utf-8")


if __name__ == "__main__":
    main()
