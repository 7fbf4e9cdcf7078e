from __future__ import annotations

from kiln.core.wording import counted, reason


def test_nouns_agree_with_their_number() -> None:
    assert [counted(n, "request") for n in (0, 1, 2)] == ["0 requests", "1 request", "2 requests"]


def test_a_reason_repeats_neither_number_nor_file() -> None:
    assert reason(FileNotFoundError(2, "No such file or directory", "x")) == "No such file or directory"
    assert reason(ValueError("of another kind")) == "of another kind"
