"""Keeps text that spells a control token text: marks go in before rendering, cuts come out behind it.

A tokenizer turns the spelling of an added token into its id wherever it stands, so a user could write
`<|im_end|>` and end the turn. Before rendering, invisible marks are put into texts from outside: inside
every spelling, and at edges of a text where a neighbour could complete one (`<|im_` before a template's
`end|>`). Templates carry the marks along; they do not mind them, since private-use characters are neither
whitespace nor markup. After rendering, each mark is weighed: where the text around it does spell an added
token it becomes a cut, everywhere else it vanishes. The prompt is encoded cut by cut, so no spelling a
user had a hand in is ever seen whole, and a prompt without one is encoded exactly as it always was.

Because superfluous marks vanish they can be placed generously, which is what makes the edges safe even if
a template trims a text, glues two together or cuts tags out of one.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from kiln.core.errors import InvalidField
from kiln.core.tokens import Tokenizer

# Words that templates compare with or look up: as roles, keys, types or choices. They alone are never
# marked at their edges, or `role == 'user'` would fail for a model that has a token `<|user|>`.
PLAIN_WORDS = frozenset(
    "system developer user assistant tool tools function ipython model observation "
    "type name description parameters properties required items enum default strict id arguments return "
    "object array string integer number boolean null anyOf oneOf allOf additionalProperties title format "
    "auto none any json text".split()
)
_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")
_PLANES = (0xF0000, 0x100000)


class Spellings:
    """A set of texts to find in others, with the questions that shielding asks."""

    def __init__(self, spellings: Iterable[str]) -> None:
        """Texts of one character are left out, as they cannot be cut."""
        self._items = frozenset(s for s in spellings if len(s) > 1)
        self._lengths: dict[str, list[int]] = {}
        for length, first in sorted({(len(s), s[0]) for s in self._items}):
            self._lengths.setdefault(first, []).append(length)
        firsts = "".join(re.escape(first) for first in sorted(self._lengths))
        self._first = re.compile(f"[{firsts}]") if firsts else None
        self._heads = frozenset(s[:end] for s in self._items for end in range(1, len(s)))
        self._tails = frozenset(s[start:] for s in self._items for start in range(1, len(s)))
        self._all = "\n\n\n".join(sorted(self._items))
        self._longest = max(map(len, self._items), default=0)

    def occurrences(self, text: str) -> Iterator[tuple[int, int]]:
        """(start, end) of every spelling in the text, overlapping ones too, by start."""
        if self._first is None:
            return
        for found in self._first.finditer(text):
            start = found.start()
            for length in self._lengths[found[0]]:
                if text[start : start + length] in self._items:
                    yield start, start + length

    def begin_in(self, text: str) -> bool:
        """Whether the text ends with the beginning of a spelling."""
        return any(text[-size:] in self._heads for size in range(1, self._longest))

    def end_in(self, text: str) -> bool:
        """Whether the text begins with the end of a spelling."""
        return any(text[:size] in self._tails for size in range(1, self._longest))

    def contain(self, text: str) -> bool:
        """Whether the text is a part of a spelling."""
        return 0 < len(text) < self._longest and text in self._all


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A rendered prompt with its cuts: `marked` holds `shield` wherever a user's spelling is cut.

    An empty `shield` means that there are no cuts.
    """

    marked: str
    shield: str

    @property
    def text(self) -> str:
        """The prompt as the model reads it."""
        return self.marked.replace(self.shield, "")

    def with_suffix(self, suffix: str) -> RenderedPrompt:
        """The prompt with text of the server's own behind it, such as a seeded open tag."""
        return RenderedPrompt(self.marked + suffix, self.shield)

    def ends_with(self, tag: str) -> bool:
        """Whether the template, not a user's text, ended the prompt with this tag, whitespace aside."""
        return self.marked.rstrip().endswith(tag.rstrip())


def encode_prompt(prompt: RenderedPrompt, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a prompt. A spelling that a user wrote never becomes the token it spells."""
    fragments = prompt.marked.split(prompt.shield) if prompt.shield else [prompt.marked]
    ids: list[int] = []
    for fragment in fragments:
        if fragment:
            ids += tokenizer.encode(fragment, parse_special=True)
    return ids


class Shield:
    """What one model's tokenizer must not see whole. Made once a model, safe for many threads."""

    def __init__(
        self,
        *,
        added_spellings: Iterable[str] = (),
        control_spellings: Iterable[str] = (),
        extra_spellings: Iterable[str] = (),
    ) -> None:
        """`extra_spellings` are tags that structure the text without being tokens of the tokenizer.

        Added tokens that are plain words, whitespace or ruled lines are left alone: they forge nothing, and
        cutting them would change how ordinary text is tokenized (Gemma's runs of newlines, for instance).
        """
        self.control = Spellings(control_spellings)
        control = set(control_spellings)
        others = {s for s in added_spellings if s not in control and _is_markup(s)}
        others.update(s for s in extra_spellings if s not in control)
        self.tags = Spellings(others)
        self.all = Spellings(control | others)

    def begin(self, texts: Iterable[str]) -> Marker:
        """A marker whose mark occurs in none of these texts."""
        taken = {char for text in texts for char in _PRIVATE.findall(text)}
        return Marker(self, "".join(_random_char(plane, taken) for plane in _PLANES))


class Marker:
    """Marks the texts of one conversation, then settles the marks of its rendered prompt."""

    def __init__(self, shield: Shield, mark: str) -> None:
        self._shield = shield
        self.mark = mark

    def outside(self, text: str) -> str:
        """Mark a text of the user, of a tool, or of the request."""
        cuts = {start + 1 for start, _ in self._shield.all.occurrences(text)}
        return self._insert(text, cuts | _edges(text, self._shield.all))

    def option(self, text: str) -> str:
        """Mark an argument of the template, which it is likely to compare with a word."""
        cuts = {start + 1 for start, _ in self._shield.all.occurrences(text)}
        return self._insert(text, cuts | _edges(text, self._shield.all, words=False))

    def assistant(self, text: str) -> str:
        """Mark control spellings only: templates look for reasoning and tool tags in assistant texts.

        They may also cut there and paste what is left, so each tag has edges on both sides.
        """
        control = self._shield.control
        cuts = {start + 1 for start, _ in control.occurrences(text)} | _edges(text, control)
        begin = 0
        for start, end in [*self._shield.tags.occurrences(text), (len(text), len(text))]:
            cuts.update(begin + at for at in _edges(text[begin:start], control))
            begin = max(begin, end)
        return self._insert(text, cuts)

    def deep(self, value: Any, guard: Callable[[str], str]) -> Any:
        """A copy of a JSON value with `guard` applied to every string in it, keys included."""
        if isinstance(value, str):
            return guard(value)
        if isinstance(value, dict):
            return {
                guard(key) if isinstance(key, str) else key: self.deep(item, guard)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.deep(item, guard) for item in value]
        return value

    def clean(self, text: str) -> str:
        """The text without marks, or what a template's slicing left of them."""
        return re.sub(f"[{self.mark}]", "", text)

    def settle(self, rendered: str) -> RenderedPrompt:
        """Keep the marks that cut a spelling in the rendered text, remove all others."""
        pieces = re.split(f"[{self.mark}]+", rendered)
        text = "".join(pieces)
        if len(pieces) == 1:
            return RenderedPrompt(text, self.mark)
        places = list(accumulate(map(len, pieces[:-1])))
        cuts: set[int] = set()
        for start, end in self._shield.all.occurrences(text):
            cuts.update(places[bisect_right(places, start) : bisect_left(places, end)])
        return RenderedPrompt(self._insert(text, cuts), self.mark)

    def _insert(self, text: str, cuts: set[int]) -> str:
        if not cuts:
            return text
        bounds = [0, *sorted(cuts), len(text)]
        return self.mark.join(text[a:b] for a, b in zip(bounds, bounds[1:], strict=False))


def _edges(text: str, spellings: Spellings, *, words: bool = True) -> set[int]:
    """The ends of the text where a neighbour could complete a spelling, inside the whitespace around it.

    There they survive a template's trimming, do not hinder it, and still lie within any spelling that
    reaches over the end. `words` includes texts that are the middle of a spelling, such as a key `think`
    that a template writes between angle brackets.
    """
    bare = text.strip()
    if not bare or bare in PLAIN_WORDS:
        return set()
    middle = words and spellings.contain(bare)
    left = len(text) - len(text.lstrip())
    cuts = set()
    if middle or spellings.end_in(bare):
        cuts.add(left)
    if middle or spellings.begin_in(bare):
        cuts.add(left + len(bare))
    return cuts


def _is_markup(spelling: str) -> bool:
    """Whether a user-defined token has letters and signs, as tags do."""
    letters = [char.isalnum() for char in spelling if not char.isspace() and char != "_"]
    return any(letters) and not all(letters)


def _random_char(plane: int, taken: set[str]) -> str:
    if len(taken) < 0x1000:
        # Almost every draw is free then.
        while (char := chr(plane + secrets.randbelow(0xFFFE))) in taken:
            pass
        return char
    free = [char for char in map(chr, range(plane, plane + 0xFFFE)) if char not in taken]
    if not free:
        raise InvalidField(
            "the texts hold every private-use character of a plane", param="messages", hint="Leave some out."
        )
    return secrets.choice(free)
