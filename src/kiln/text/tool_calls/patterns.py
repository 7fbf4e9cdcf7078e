"""Regular expressions of tools' schemas: which are any, and which may be compiled.

They are matched with the `regex` package, which knows classes such as `\\p{L}` as the grammars do, and ends a
match in time. Compiling has no such end: it writes out what is repeated.
"""

from __future__ import annotations

import re

import regex

# Ten milliseconds and 3 MiB.
MAX_PARTS = 10_000
# Looking for the end of a bracket that is not closed takes the square of the length.
MAX_LENGTH = 5_000
_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d+)[\d,]*\}|[()]|.", re.DOTALL)


class BadPattern(ValueError):
    """The message says what is wrong with it."""


def check_pattern(pattern: str) -> int:
    """What it costs, in characters or parts. Raises BadPattern."""
    if len(pattern) > MAX_LENGTH:
        raise BadPattern(f"it has more than {MAX_LENGTH} characters")
    parts = written_out(pattern)
    if parts > MAX_PARTS:
        raise BadPattern(f"its repeats come to more than {MAX_PARTS} parts")
    try:
        regex.compile(pattern)
    except (regex.error, OverflowError, RecursionError) as error:
        raise BadPattern(str(error) or "it is nested too deeply") from None
    return max(parts, len(pattern))


def written_out(pattern: str) -> int:
    """How many parts a pattern has when repeats stand there as often as they must, or more."""
    # What stood before each group that is open; then what this one has, without and in its last element.
    groups: list[int] = []
    total, last = 0, 0
    for part in _PARTS.finditer(pattern):
        text = part[0]
        if text == "(":
            groups.append(total + last)
            total, last = 0, 0
        elif text == ")" and groups:
            total, last = groups.pop(), max(1, total + last)
        elif part[1] is not None:
            # Numbers of thousands of digits would be slow to read.
            last = max(1, last) * (max(1, int(part[1])) if len(part[1]) < 10 else MAX_PARTS + 1)
        else:
            total, last = total + last, 1
    return total + last + sum(groups)
