"""Writes grammars in llguidance's dialect of Lark: texts, JSON of a schema, and rules that hold them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from kiln.core.tokens import Tokenizer

# One blank, or a line break and an indentation: models write both, and no more can run away.
GUIDANCE = {"whitespace_flexible": True, "whitespace_pattern": r"(\n[ ]{0,40}|[ ])?"}


class Lark:
    """The rules of one grammar over one vocabulary.

    Added tokens are no text to llguidance, so a text that spells one names it by its id.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rules: list[str] = []
        spellings = sorted((s for s in tokenizer.added_spellings if s.strip()), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, spellings)) or r"(?!)")

    def rule(self, body: str) -> str:
        """Add a rule. Returns its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def lexeme(self, body: str, *, suffix: str | None = None) -> str:
        """Add a terminal of a regular expression. With `suffix` it goes on to the first such text."""
        name = f"T{len(self._rules)}" if suffix is None else f"r{len(self._rules)}"
        ends = "" if suffix is None else f"[suffix={quote(suffix)}]"
        self._rules.append(f"{name}{ends}: {body}")
        return name

    def text(self, text: str) -> str:
        """The expression of a text, word for word. A token that ends the model's turn is left to the end."""
        parts, at = [], 0
        for found in self._added.finditer(text):
            parts += [quote(text[at : found.start()])] if found.start() > at else []
            tokens = self._tokenizer.encode(found[0])
            if len(tokens) != 1:
                parts.append(quote(found[0]))
            elif tokens[0] not in self._tokenizer.eos_ids:
                parts.append(f"<[{tokens[0]}]>")
            at = found.end()
        return " ".join([*parts, quote(text[at:])] if at < len(text) else parts) or '""'

    def up_to(self, text: str) -> str:
        """The expression of anything that is no added token, through the first such text."""
        found = self._added.fullmatch(text)
        if found is not None and len(self._tokenizer.encode(text)) == 1:
            return f"/(?s:.*)/ {self.text(text)}"
        return self.lexeme("/(?s:.*)/", suffix=text)

    def ends_turn(self, text: str) -> bool:
        """Whether a text holds a token that ends the model's turn."""
        ids = (self._tokenizer.encode(found[0]) for found in self._added.finditer(text))
        return any(len(tokens) == 1 and tokens[0] in self._tokenizer.eos_ids for tokens in ids)

    def write(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", *self._rules])


def json_of(schema: dict[str, Any] | bool) -> str:
    """The expression of the JSON that a schema admits."""
    body = schema if isinstance(schema, dict) else {}
    return f"%json {json.dumps({**body, 'x-guidance': GUIDANCE})}"


def either(expressions: Sequence[str]) -> str:
    return expressions[0] if len(expressions) == 1 else f"({' | '.join(expressions)})"


def quote(text: str) -> str:
    """A text as a Lark string."""
    return json.dumps(text).replace("\x7f", "\\u007f")
