"""What a tool-call format is, and the JSON that all of them share."""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from kiln.text.lark import Lark, either, json_of
from kiln.text.scanner import ToolMarkers

# The parameters of each tool that may be called, by its name.
Schemas = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call the model made. `arguments` is the JSON text of an object."""

    id: str
    name: str
    arguments: str

    def to_openai(self) -> dict[str, Any]:
        """The call in OpenAI's shape."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(frozen=True, slots=True)
class Framing:
    """The texts around the JSON arguments of one call: all that is generated is before + JSON + after."""

    before: str
    after: str


class ToolFormat(ABC):
    """How one family of models writes its calls.

    `markers` is what the scanner looks for. `silent` are texts around answers that are no content, such as
    channel headers; they are dropped whether or not there are tools. `joiner` stands between two calls,
    `after_thought` behind a thought, and `answer_header` before an answer that is no call.
    """

    name: ClassVar[str]
    markers: ClassVar[ToolMarkers]
    silent: ClassVar[tuple[str, ...]] = ()
    joiner: ClassVar[str] = "\n"
    after_thought: ClassVar[str] = ""
    answer_header: ClassVar[str] = ""

    @abstractmethod
    def is_used_by(self, template_source: str) -> bool:
        """Whether a chat template tells the model to write its calls so."""

    @abstractmethod
    def parse(self, body: str, schemas: Schemas) -> tuple[ToolCall, ...] | None:
        """The calls in the text between the markers, in order; None when it does not parse.

        `schemas` tells formats without types what an argument is. Ids are new.
        """

    def framing(self, name: str) -> Framing | None:
        """The texts around the arguments of a call of `name`, markers included.

        None for a format whose arguments are not JSON.
        """
        return None

    def call_rule(self, name: str, parameters: Mapping[str, Any], lark: Lark) -> str:
        """The expression of one call of `name` whose arguments keep to a JSON Schema of an object."""
        framing = self.framing(name)
        assert framing is not None, "a format whose arguments are not JSON has a rule of its own"
        arguments = lark.rule(json_of(dict(parameters)))
        return f"{lark.text(framing.before)} {arguments} {lark.text(framing.after)}"

    def calls_rule(self, calls: Sequence[str], lark: Lark, *, many: bool) -> str:
        """The expression of one of the `calls`, or, with `many`, of one or more in a row."""
        call = lark.rule(either(calls))
        if not many or lark.ends_turn(self.markers.close):
            return call
        return f"{call} ({lark.text(self.joiner)} {call})*"

    @property
    def texts(self) -> Sequence[str]:
        """Every text that must reach the scanner, though it may be a control token."""
        marks = self.markers
        return [text for text in (marks.open, *marks.also_open, marks.close, *self.silent) if text]


def new_call(name: object, arguments: object) -> ToolCall | None:
    """A call of parsed values; None when they are no name and no object.

    `arguments` is an object, or a text that holds the JSON of one. It is written anew with its keys in
    order, so the text a client gets is valid JSON whatever spacing the model chose.
    """
    if isinstance(arguments, str):
        arguments = load_object(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    text = _dump(arguments)
    if text is None or _has_surrogate(name):
        return None
    return ToolCall(new_call_id(), name, text)


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def load_object(text: str) -> dict[str, Any] | None:
    value = load_json(text)
    return value if isinstance(value, dict) else None


def load_json(text: str) -> Any:
    """The value of a JSON text; None when it is not JSON."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def load_sequence(text: str, separators: str) -> list[Any] | None:
    """JSON values that stand one behind the other; None when something else stands between them."""
    decoder, values, at = json.JSONDecoder(parse_constant=_refuse_constant), [], 0
    text = text.strip()
    try:
        while at < len(text):
            value, at = decoder.raw_decode(text, at)
            values.append(value)
            while at < len(text) and (text[at].isspace() or text[at] in separators):
                at += 1
    except (ValueError, RecursionError):
        return None
    return values


def calls_of(values: Sequence[Any], arguments_key: str) -> tuple[ToolCall, ...] | None:
    """Calls of objects `{"name", <arguments_key>}`; None unless there are some and all are well formed."""
    calls = []
    for value in values:
        if not isinstance(value, dict):
            return None
        call = new_call(value.get("name"), value.get(arguments_key))
        if call is None:
            return None
        calls.append(call)
    return tuple(calls) or None


def _dump(value: dict[str, Any]) -> str | None:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        # A lone surrogate has no UTF-8 form; as an escape it survives.
        return json.dumps(value, allow_nan=False) if _has_surrogate(text) else text
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)
