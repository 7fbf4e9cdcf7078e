"""Search for a fixed set of markers in a text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable


class MarkerSearch:
    """Leftmost, longest search with the smallest possible hold-back.

    The leftmost match wins, and the longest of those that begin at the same place, whatever the cuts
    between pieces. Text is held back only while it may still become a marker. Every marker carries its own
    Knuth-Morris-Pratt progress, so that no character is looked at twice between two matches, however long
    the markers are. An empty marker is ignored.
    """

    def __init__(self, markers: Iterable[str]) -> None:
        self._markers = tuple(dict.fromkeys(m for m in markers if m))
        self._fallbacks = tuple(_fallbacks(m) for m in self._markers)
        firsts = "".join(sorted({re.escape(m[0]) for m in self._markers}))
        self._first = re.compile(f"[{firsts}]") if firsts else None
        self._text = ""
        self._restart()

    def _restart(self) -> None:
        self._scanned = 0
        self._progress = [0] * len(self._markers)
        self._held = 0  # how many of the scanned characters may still be the start of a marker
        self._best: tuple[int, str] | None = None

    def is_clear_of(self, text: str) -> bool:
        """Whether nothing is held back and no marker can begin in `text`, which need not be pushed then."""
        return not self._text and (self._first is None or self._first.search(text) is None)

    def push(self, text: str) -> None:
        """Append text that `next` has yet to look at."""
        self._text += text

    def next(self, *, final: bool = False) -> tuple[str, str | None]:
        """Text that is certainly no marker, and the marker directly behind it.

        The marker is None when there is none yet; the text behind a found marker stays, for `take` or for
        the next call. `final` says that no more text will come, which settles everything held back.
        """
        self._scan()
        if self._best is not None and (final or self._is_settled()):
            start, marker = self._best
            plain, self._text = self._text[:start], self._text[start + len(marker) :]
            self._restart()
            return plain, marker
        keep_from = self._scanned if final else self._scanned - self._held
        if self._best is not None:
            keep_from = min(keep_from, self._best[0])
            self._best = (self._best[0] - keep_from, self._best[1])
        plain, self._text = self._text[:keep_from], self._text[keep_from:]
        self._scanned -= keep_from
        return plain, None

    def take(self) -> str:
        """Remove and return all text that is still here."""
        text, self._text = self._text, ""
        self._restart()
        return text

    def _scan(self) -> None:
        """Advance over the unseen text, up to a settled match."""
        if self._first is None:
            self._scanned = len(self._text)
            return
        while self._scanned < len(self._text) and not self._is_settled():
            if not self._held and self._best is None:
                found = self._first.search(self._text, self._scanned)
                if found is None:
                    self._scanned = len(self._text)
                    return
                self._scanned = found.start()
            self._advance(self._text[self._scanned])

    def _advance(self, char: str) -> None:
        self._scanned += 1
        held = 0
        for number, marker in enumerate(self._markers):
            fallback, length = self._fallbacks[number], self._progress[number]
            while length and marker[length] != char:
                length = fallback[length - 1]
            if marker[length] == char:
                length += 1
            if length == len(marker):
                self._note_match(self._scanned - length, marker)
                length = fallback[length - 1]
            self._progress[number] = length
            held = max(held, length)
        self._held = held

    def _note_match(self, start: int, marker: str) -> None:
        """Keep the leftmost match; a later one at the same start is longer."""
        if self._best is None or start <= self._best[0]:
            self._best = (start, marker)

    def _is_settled(self) -> bool:
        """Whether nothing unfinished begins before the match found, or at its start."""
        return self._best is not None and self._scanned - self._held > self._best[0]


def _fallbacks(marker: str) -> list[int]:
    """For each prefix of the marker, the length of its longest proper border."""
    table = [0] * len(marker)
    length = 0
    for end in range(1, len(marker)):
        while length and marker[length] != marker[end]:
            length = table[length - 1]
        if marker[length] == marker[end]:
            length += 1
        table[end] = length
    return table
