"""The byte-level BPE tokenizer and the chat template.

Two variants with the same ids: in the second one the think tags are ordinary text of several
pieces, and their two ids are unused control tokens.
"""

import json
import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .dialogue import Dialogue
from .dialogues import draw_dialogue

TEMPLATE = Path(__file__).with_name("template.jinja").read_text(encoding="utf-8")
VOCABULARY = 768
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
THINK_TAGS = ["<think>", "</think>"]
TOOL_TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
UNUSED = ["<|unused_0|>", "<|unused_1|>"]
MERGE_TEXTS = 6000
_TAGS = re.compile("|".join(re.escape(tag) for tag in CONTROL + THINK_TAGS + TOOL_TAGS))

# The pre-tokenizer pattern of Qwen2, which llama.cpp knows as "qwen2".
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def _template() -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATE)


def render(dialogue: Dialogue, *, thinking: bool) -> str:
    """The prompt text up to where the model goes on."""
    return _template().render(
        messages=dialogue.messages,
        tools=dialogue.tools,
        add_generation_prompt=True,
        enable_thinking=thinking,
    )


def _corpus(seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    # The tags as text, so that they are few pieces where they are not tokens of their own.
    tags = ["<think>\n", "</think>", "</think>\n\n"]
    for number in range(MERGE_TEXTS):
        dialogue = draw_dialogue(rng)
        if dialogue.kind == "scripts" or dialogue.endless:
            continue  # other scripts and emoji stay single bytes: tests need split characters
        # Added tokens are split off before merges act, so merges are learned between them.
        yield from _TAGS.split(render(dialogue, thinking=True))
        yield from _TAGS.split(f"{dialogue.thought}</think>\n\n{dialogue.reply}")
        if number % 8 == 0:
            yield tags[number // 8 % 3]


def train_tokenizer(seed: int, *, tags_as_text: bool = False) -> Tokenizer:
    """Learns the merges and appends the added tokens, 768 entries in all."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = len(CONTROL) + len(THINK_TAGS) + len(TOOL_TAGS)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - added,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(seed), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROL])
    if tags_as_text:
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in UNUSED])
    else:
        tokenizer.add_tokens([AddedToken(text, special=False) for text in THINK_TAGS])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in TOOL_TAGS])
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(f"expected {VOCABULARY} tokens, got {tokenizer.get_vocab_size()}")
    return tokenizer


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer with its template, ready for `save_pretrained`."""
    settings: dict[str, Any] = {
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)
    wrapped.chat_template = TEMPLATE
    return wrapped
