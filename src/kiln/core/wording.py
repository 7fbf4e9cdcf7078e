"""Small matters of English in what kiln says."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 round`, `2 rounds`: for nouns that take an s."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def reason(error: Exception) -> str:
    """What an error says, without its number and the file that the sentence around it names already."""
    return getattr(error, "strerror", None) or str(error)
