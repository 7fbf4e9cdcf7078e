"""Small text helpers."""

from __future__ import annotations


def shorten(value: object, limit: int = 120) -> str:
    """`repr` of a caller's value for an error message, cut so that a message stays a message."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
