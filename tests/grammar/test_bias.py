"""Logit bias by token id and by text."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiln.backends.llamacpp import LlamaModel
from kiln.chat.preparing.bias import resolve_bias
from kiln.core.errors import InvalidField
from servers.server import FIXTURES

from .letters import CALL, Letters

LETTERS = Letters()


def test_ids_and_texts() -> None:
    assert resolve_bias((), LETTERS) is None
    assert resolve_bias(((65, -100.0), ("<call>", 5.0)), LETTERS) == {65: -100.0, CALL: 5.0}
    # No token reads so: every token that it is cut into.
    assert resolve_bias((("abba", 2.0),), LETTERS) == {97: 2.0, 98: 2.0}
    # Two entries for one token add up.
    assert resolve_bias((("A", 1.5), (65, 2.0)), LETTERS) == {65: 3.5}


def test_every_token_that_reads_so_is_meant() -> None:
    letters = Letters()
    letters.pieces[200] = b"A"
    assert resolve_bias((("A", 1.0),), letters) == {65: 1.0, 200: 1.0}


@pytest.mark.parametrize(
    ("key", "value", "param"),
    [
        (262, 1.0, "logit_bias.262"),
        (-1, 1.0, "logit_bias.-1"),
        (65, 100.5, "logit_bias.65"),
        (65, float("nan"), "logit_bias.65"),
        (65, float("-inf"), "logit_bias.65"),
        ("A", -101.0, "logit_bias.'A'"),
        ("", 1.0, "logit_bias"),
    ],
)
def test_what_names_no_token_or_is_too_strong(key: int | str, value: float, param: str) -> None:
    with pytest.raises(InvalidField) as refused:
        resolve_bias(((key, value),), LETTERS)
    assert refused.value.param == param


def test_a_real_vocabulary() -> None:
    llama = LlamaModel(Path(FIXTURES / "multi-close.gguf"), vocabulary_only=True)
    spelled = resolve_bias((("</think>", 1.0),), llama)
    assert spelled == dict.fromkeys(llama.encode("</think>"), 1.0) and len(spelled) == 3
    whole = resolve_bias((("<|im_end|>", -7.0),), llama)
    assert whole == {llama.pieces.index(b"<|im_end|>"): -7.0}
    llama.close()
