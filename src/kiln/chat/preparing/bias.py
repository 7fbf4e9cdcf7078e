"""Logit bias as callers state it, by token id or by text, to token ids."""

from __future__ import annotations

import math
from collections import defaultdict

from kiln.core.errors import InvalidField
from kiln.core.text import shorten
from kiln.core.tokens import Tokenizer

STRONGEST = 100.0


def resolve_bias(
    entries: tuple[tuple[int | str, float], ...], tokenizer: Tokenizer
) -> dict[int, float] | None:
    """What is added to the logits of which token ids; None for nothing.

    A text stands for every token that reads exactly so, or, where there is none, for the tokens that it is
    cut into. A token that several entries name gets their sum. Raises InvalidField.
    """
    if not entries:
        return None
    bias: dict[int, float] = defaultdict(float)
    named = _tokens_of_texts([key for key, _ in entries if isinstance(key, str)], tokenizer)
    for key, value in entries:
        _check(key, value, tokenizer.n_vocab)
        for token in named[key] if isinstance(key, str) else (key,):
            bias[token] += value
    return dict(bias)


def _check(key: int | str, value: float, n_vocab: int) -> None:
    param = f"logit_bias.{shorten(key) if isinstance(key, str) else key}"
    if key == "":
        raise InvalidField(
            "an empty text names no token", param="logit_bias", hint="Give a text or a token id."
        )
    if isinstance(key, int) and not 0 <= key < n_vocab:
        raise InvalidField(
            f"there is no token {key}: the vocabulary has {n_vocab}",
            param=param,
            hint=f"Give a token id between 0 and {n_vocab - 1}, or a text.",
        )
    if not math.isfinite(value) or abs(value) > STRONGEST:
        raise InvalidField(
            f"the bias of {shorten(key)} must be a number between -100 and 100, not {value}", param=param
        )


def _tokens_of_texts(texts: list[str], tokenizer: Tokenizer) -> dict[str, list[int]]:
    """Token ids of every text, from one look through the vocabulary."""
    found: dict[str, list[int]] = {text: [] for text in texts}
    if not found:
        return {}
    wanted = {text.encode("utf-8", "replace"): tokens for text, tokens in found.items()}
    for token, piece in enumerate(tokenizer.pieces):
        tokens = wanted.get(piece)
        if tokens is not None:
            tokens.append(token)
    return {
        text: tokens or sorted(set(tokenizer.encode(text, parse_special=False)))
        for text, tokens in found.items()
    }
