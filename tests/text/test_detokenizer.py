from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kiln.text.detokenizer import Detokenizer

BYTES = [bytes([byte]) for byte in range(256)]


def decode(data: bytes, sizes: list[int] | None = None) -> list[str]:
    """Every text fed out, the last from finish; `sizes` cuts the data into tokens."""
    pieces, at = [], 0
    for size in sizes or []:
        pieces.append(data[at : at + size])
        at += size
    pieces.append(data[at:])
    detokenizer = Detokenizer(pieces)
    return [*(detokenizer.feed(i) for i in range(len(pieces))), detokenizer.finish()]


@settings(deadline=None)
@given(st.text(), st.lists(st.integers(0, 5)))
def test_valid_text_cut_anywhere_comes_out_whole(text: str, sizes: list[int]) -> None:
    outs = decode(text.encode(), sizes)
    assert "".join(outs) == text
    assert outs[-1] == ""


@settings(deadline=None)
@given(st.text())
def test_each_character_appears_with_its_last_byte(text: str) -> None:
    detokenizer = Detokenizer(BYTES)
    for char in text:
        *begin, last = char.encode()
        assert [detokenizer.feed(byte) for byte in begin] == [""] * len(begin)
        assert detokenizer.feed(last) == char


@settings(deadline=None)
@given(st.text(), st.characters(min_codepoint=0x80, exclude_categories=["Cs"]), st.text(), st.integers(1, 3))
def test_a_cut_off_character_is_dropped(before: str, char: str, after: str, size: int) -> None:
    half = char.encode()[:size]
    if len(half) < len(char.encode()):
        assert "".join(decode(before.encode() + half + after.encode())) == before + after


@settings(deadline=None)
@given(st.binary(), st.lists(st.integers(0, 4)))
def test_cuts_make_no_difference_for_any_bytes(data: bytes, sizes: list[int]) -> None:
    assert "".join(decode(data, sizes)) == "".join(decode(data))


def test_a_half_character_at_the_end_is_dropped() -> None:
    assert decode("a€".encode()[:-1]) == ["a", ""]


def test_a_close_tag_forced_into_a_character() -> None:
    detokenizer = Detokenizer(["€".encode()[:2], b"</think>", "é".encode()])
    assert [detokenizer.feed(i) for i in range(3)] == ["", "</think>", "é"]


def test_bytes_that_begin_nothing_become_replacement_characters() -> None:
    assert "".join(decode(b"a\x80b\xffc\xc0")) == "a\ufffdb\ufffdc\ufffd"


def test_the_models_own_replacement_character_stays() -> None:
    assert "".join(decode("a\ufffdb".encode(), [2, 1])) == "a\ufffdb"


def test_hidden_tokens_yield_nothing() -> None:
    detokenizer = Detokenizer([b"a", b"<|im_end|>"], frozenset([1]))
    assert [detokenizer.feed(i) for i in (0, 1, 0)] == ["a", "", "a"]
