"""A vocabulary of single bytes and a few longer tokens, for grammars over scripted models."""

from __future__ import annotations

from collections.abc import Sequence

EOS, CLOSE, CALL, NEWLINES, CLOSE_AND_BRACE, LAST_OF_CLOSE = 256, 257, 258, 259, 260, 261
N_VOCAB = 262


class Letters:
    """Implements the `Tokenizer` port. Token i below 256 is byte i."""

    n_vocab = N_VOCAB
    bos_text = eos_text = ""

    def __init__(self, *, eos_ids: Sequence[int] = (EOS,)) -> None:
        longer = [b"<end>", b"</think>", b"<call>", b"\n\n", b">[", b">"]
        self.pieces: list[bytes] = [bytes([byte]) for byte in range(256)] + longer
        self.eos_ids = frozenset(eos_ids)
        self.added_spellings: list[str] = ["</think>", "<call>", "<end>"]
        self.control_spellings: list[str] = ["<end>"]

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        if parse_special and text.encode() in self.pieces[EOS:]:
            return [self.pieces.index(text.encode(), EOS)]
        return list(text.encode())

    def read(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces[token] for token in ids).decode()


def spell(text: str) -> list[int]:
    return list(text.encode())
