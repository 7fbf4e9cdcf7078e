"""Token ids to text, one token at a time, without ever showing half a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

_DROP_HALVES = "kiln-drop-half-characters"
_LEAD_BYTES = range(0xC2, 0xF5)


def _drop_half_character(error: UnicodeError) -> tuple[str, int]:
    """Codec error handler: the start of a character that never ended is dropped, other bytes become U+FFFD.

    The decoder reports the longest range that could have begun a character, so its first byte tells which
    of the two it is.
    """
    if not isinstance(error, UnicodeDecodeError):
        raise error
    cut_short = error.object[error.start] in _LEAD_BYTES
    return ("" if cut_short else "\ufffd"), error.end


codecs.register_error(_DROP_HALVES, _drop_half_character)


class Detokenizer:
    """Incremental UTF-8 decoder over token pieces. One per generated choice, not shared between threads.

    An incomplete character is held back until its bytes arrive. Where something else arrives in their
    place, a forced close tag for instance, or the text ends, it is dropped. A U+FFFD that the model wrote
    itself stays, and bytes that can never begin a character become one.
    """

    def __init__(self, pieces: Sequence[bytes], hidden_ids: frozenset[int] = frozenset()) -> None:
        """`pieces[i]` are the bytes of token i; tokens in `hidden_ids` yield no text."""
        self._pieces = pieces
        self._hidden_ids = hidden_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors=_DROP_HALVES)
        self._holds_back = False

    def feed(self, token_id: int) -> str:
        """The text that became complete with this token, possibly empty. IndexError for an unknown id."""
        if token_id in self._hidden_ids:
            return ""
        piece = self._pieces[token_id]
        if not self._holds_back and piece.isascii():
            return piece.decode()
        text = self._decoder.decode(piece)
        self._holds_back = self._decoder.getstate()[0] != b""
        return text

    def finish(self) -> str:
        """The rest of the text. A half character at the end is dropped."""
        return self._decoder.decode(b"", final=True)
