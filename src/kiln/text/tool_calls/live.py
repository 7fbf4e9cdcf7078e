"""The arguments of a call while it is written, where a grammar guarantees its form."""

from __future__ import annotations

from collections.abc import Iterable

from kiln.text.tool_calls.base import ToolFormat, new_call_id


class LiveCall:
    """Reads one call's body piece by piece: first the text before the arguments, then their JSON.

    A body that does not begin as the format frames one of the tools shows nothing; it is read when whole.
    """

    def __init__(self, tool_format: ToolFormat, names: Iterable[str]) -> None:
        self.id = new_call_id()
        self.name: str | None = None
        self._heads = [
            (name, framing.before) for name in names if (framing := tool_format.framing(name)) is not None
        ]
        self._body = ""
        self._arguments: list[str] = []
        self._depth = 0
        self._in_string = self._escaped = self._ended = False

    @property
    def arguments(self) -> str | None:
        """The JSON text of the arguments, None until it is whole."""
        return "".join(self._arguments) if self._ended else None

    def feed(self, text: str, opened_by: str) -> str:
        """The part of the arguments that became known; `name` is set once the first of it is."""
        if self._ended:
            return ""
        if self.name is None:
            self._body += text
            text = self._find_head(opened_by)
        fragment = self._take(text)
        if fragment:
            self._arguments.append(fragment)
        return fragment

    def _find_head(self, opened_by: str) -> str:
        """What stands behind the head, once it is there."""
        for name, before in self._heads:
            head = before.removeprefix(opened_by)
            if self._body.startswith(head):
                self.name = name
                return self._body[len(head) :]
        return ""

    def _take(self, text: str) -> str:
        """The text up to the end of the JSON object that it continues."""
        for at, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._ended = True
                    return text[: at + 1]
        return text
