"""Whether a grammar compiles and can begin: the work of a child process, on what strangers send.

Imports little: the child should be ready soon and leave its memory to the work.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper


class _Vocabulary:
    """The added tokens of a model and, behind its vocabulary, the bytes that answers are spelled with."""

    def __init__(self, n_vocab: int, special: list[tuple[int, str]], ends: list[int]) -> None:
        self.first_byte = n_vocab
        self.tokens = [b""] * n_vocab + [bytes([byte]) for byte in range(256)] + [b"</s>"]
        for token, spelling in special:
            self.tokens[token] = spelling.encode()
        # llguidance wants an end token, which not every vocabulary has.
        self.ends = ends or [len(self.tokens) - 1]
        self.special_token_ids = [*(token for token, _ in special), len(self.tokens) - 1]
        self.bos_token_id = None
        self.eos_token_id = self.ends[0]

    def __call__(self, text: bytes | str) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        return [self.first_byte + byte for byte in data]


def checker(setting: bytes) -> Callable[[bytes], bytes]:
    """The work for a vocabulary: JSON of `n_vocab`, `special` (pairs of id and spelling) and `ends`.

    Its result is JSON: null, or `problem` (llguidance's message) and `compiles`.
    """
    vocabulary = _Vocabulary(**json.loads(setting))
    tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=vocabulary.ends, slices=[])

    def check(grammar: bytes) -> bytes:
        matcher = LLMatcher(tokenizer, grammar.decode(), log_level=0)
        if matcher.is_error():
            return json.dumps({"problem": matcher.get_error(), "compiles": False}).encode()
        problem = _first_steps(matcher, vocabulary)
        return b"null" if problem is None else json.dumps({"problem": problem, "compiles": True}).encode()

    return check


def _first_steps(matcher: LLMatcher, vocabulary: _Vocabulary) -> str | None:
    """What is wrong at the first token, or behind a bracket that may come first; "" where nothing may."""
    mask = matcher.compute_bitmask()
    if matcher.is_error() or not any(mask):
        return matcher.get_error()
    for bracket in b"{[":
        token = vocabulary.first_byte + bracket
        if mask[token // 8] >> token % 8 & 1:
            behind = matcher.deep_copy()
            behind.consume_token(token)
            if behind.is_error():
                return behind.get_error()
    return None
