"""Facts: what is remembered, and the values that the memory's tables hold."""

from __future__ import annotations

import difflib
import re
import unicodedata
from dataclasses import dataclass
from typing import Literal

MAX_FACT_CHARS = 1000
MAX_QUERY_WORDS = 64

_FILLERS = frozenset(
    "a about an and any are as at be been but by can could did do does for from had has have he her hers"
    " him his how i if in is it its me my of on or our s she should so t than that the their them then"
    " there these they this to was we were what when where which who whom whose why will with would you"
    " your".split()
)
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class MemoryKey:
    """One memory: whose it is, its id, and the store (the policy) that it lies under."""

    owner: str
    memory: str
    store: str


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact. Times are seconds of Unix time.

    One that was contradicted or reworded has `invalidated_at`, and `superseded_by` names what stands in its
    place. `source` is the id of the exchange it was learned from, None if it was written.
    """

    id: str
    text: str
    created_at: float
    last_used_at: float | None
    uses: int
    invalidated_at: float | None
    superseded_by: str | None
    source: str | None


@dataclass(frozen=True, slots=True)
class NewFact:
    """A fact to be written; `replaces` are ids of facts that it contradicts."""

    text: str
    replaces: tuple[str, ...] = ()
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a new fact: `added`, `known` in these words, or `replaced` others, now invalid."""

    fact: Fact
    status: Literal["added", "known", "replaced"]


def is_memory_id(text: str) -> bool:
    """Whether a text may be the id of a memory or the name of a store."""
    return _ID.fullmatch(text) is not None


def clean(text: str) -> str:
    """A fact on one line, without control characters. Empty if nothing is left."""
    visible = "".join(" " if unicodedata.category(c) in ("Cc", "Zl", "Zp") else c for c in text)
    return " ".join(visible.encode("utf-8", "replace").decode("utf-8").split())


def normalize(text: str) -> str:
    """The form in which equal facts are equal: letter case, width, spaces and final marks do not count."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(folded.split()).strip(" .!,;:\"'")


def words_of(text: str) -> list[str]:
    """The words that a full-text search looks for: each once, 64 at most.

    English words that say nothing by themselves are left out, unless there are no others: in a small memory
    they are as rare as the words that matter.
    """
    words = list(dict.fromkeys(re.findall(r"\w+", text.casefold())))
    telling = [word for word in words if word not in _FILLERS]
    return (telling or words)[:MAX_QUERY_WORDS]


def shares_words(fact: str, text: str) -> bool:
    """Whether a fact has anything of a text in it: the beginning of a telling word, or two signs in a row
    of a script that is written without spaces."""
    return bool(_traces(fact) & _traces(text))


def _traces(text: str) -> set[str]:
    found = set()
    for word in re.findall(r"\w+", text.casefold()):
        if any(c >= "\u0e00" and not c.isspace() for c in word):
            found |= {word[i : i + 2] for i in range(len(word) - 1)} or {word}
        elif word not in _FILLERS and word != "user":
            # Endings differ: "I moved" becomes "the user moves".
            found.add(word[:4])
    return found


def similarity(a: str, b: str) -> float:
    """How alike two facts are in their words and the order of them, 0 to 1."""
    words_a, words_b = re.findall(r"\w+", normalize(a)), re.findall(r"\w+", normalize(b))
    return difflib.SequenceMatcher(None, words_a, words_b, autojunk=False).ratio()
