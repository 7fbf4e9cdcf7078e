"""Renders a conversation with the model's own chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kiln.core.errors import InvalidField, ModelLoadError, TemplateFailed
from kiln.core.messages import Conversation, Message
from kiln.text.shield import Marker, RenderedPrompt, Shield, encode_prompt

__all__ = ["ChatTemplate", "RenderedPrompt", "content_text", "encode_prompt"]

MAX_PROMPT_CHARS = 16 * 1024 * 1024
_RESERVED = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")
_TEXT_PARTS = ("text", "input_text", "output_text")
# JSON escapes of private-use characters of planes 15 and 16: shield marks must survive `ensure_ascii`.
_ESCAPED_MARK = re.compile(r"\\udb[89a-f][0-9a-f]\\ud[c-f][0-9a-f]{2}")


def content_text(content: object, *, param: str = "messages") -> str:
    """The text of OpenAI message content: a string, null, or an array of parts.

    Text parts are joined, parts of other types are left out. InvalidField names `param` when a part or its
    text has the wrong type.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidField("message content must be a string, null, or an array of parts", param=param)
    return "".join(_part_text(part, param) for part in content)


def _part_text(part: object, param: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        return ""
    if part.get("type", "text") not in _TEXT_PARTS:
        return ""
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidField("a text part must have a string `text`", param=param)
    return text


class ChatTemplate:
    """A compiled chat template, rendered the way transformers renders it. Safe for many threads."""

    def __init__(
        self,
        source: str,
        *,
        bos_text: str = "",
        eos_text: str = "",
        added_spellings: Sequence[str] = (),
        control_spellings: Sequence[str] = (),
        extra_spellings: Sequence[str] = (),
    ) -> None:
        """ModelLoadError when `source` does not compile.

        The spellings are the tokenizer's; `extra_spellings` are reasoning and tool tags that are no added
        tokens and yet must not pass for the template's own when a user writes them.
        """
        self.source = source
        self._constants = {"bos_token": bos_text, "eos_token": eos_text}
        self._shield = Shield(
            added_spellings=added_spellings,
            control_spellings=control_spellings,
            extra_spellings=extra_spellings,
        )
        self._reasoning_key = _reasoning_key(source)
        try:
            self._template = _Environment().from_string(source)
        except Exception as error:  # jinja2's own errors, but also Python's from the compiled code
            raise ModelLoadError(f"the chat template does not compile: {error}") from error

    def render(self, conversation: Conversation, *, add_generation_prompt: bool = True) -> RenderedPrompt:
        """The prompt, shielded.

        InvalidField for template arguments that would replace the conversation; TemplateFailed, with the
        template's own words, when it refuses the conversation or goes wrong.
        """
        for name in _RESERVED:
            if name in conversation.template_kwargs:
                raise InvalidField(f"`{name}` cannot be a template argument", param="chat_template_kwargs")
        marker: Marker | None = None
        try:
            marker = self._shield.begin([self.source, *_strings(conversation)])
            values = self._values(conversation, marker)
            values["add_generation_prompt"] = add_generation_prompt
            return marker.settle(self._render(values))
        except Exception as error:  # a template is a program: it may raise anything at all
            message = _describe(error)
            raise TemplateFailed(marker.clean(message) if marker else message, param="messages") from error

    def _values(self, conversation: Conversation, marker: Marker) -> dict[str, Any]:
        values: dict[str, Any] = {"documents": None}
        for name, value in conversation.template_kwargs.items():
            values[name] = marker.deep(value, marker.option)
        values["messages"] = [self._message(message, marker) for message in conversation.messages]
        values["tools"] = marker.deep(conversation.tools, marker.outside) or None
        if conversation.tool_choice is not None:
            values["tool_choice"] = marker.deep(conversation.tool_choice, marker.option)
        return values | self._constants

    def _message(self, message: Message, marker: Marker) -> dict[str, Any]:
        guard = marker.assistant if message.role == "assistant" else marker.outside
        values: dict[str, Any] = {"role": marker.outside(message.role), "content": guard(message.content)}
        if message.reasoning_content is not None:
            values[self._reasoning_key] = guard(message.reasoning_content)
        if message.tool_calls:
            values["tool_calls"] = [_tool_call(call, marker, guard) for call in message.tool_calls]
        if message.name is not None:
            values["name"] = marker.outside(message.name)
        if message.tool_call_id is not None:
            values["tool_call_id"] = marker.outside(message.tool_call_id)
        return values

    def _render(self, values: dict[str, Any]) -> str:
        pieces, size = [], 0
        for piece in self._template.generate(values):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_PROMPT_CHARS:
                raise SecurityError(f"the prompt is longer than {MAX_PROMPT_CHARS} characters")
        return "".join(pieces)


class _Arguments(dict[str, Any]):
    """Tool-call arguments that came as JSON text: an object to templates that look inside or write JSON,
    that text to those that print it or add it to a string."""

    def __init__(self, value: dict[str, Any], text: str) -> None:
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def _tool_call(call: Any, marker: Marker, guard: Callable[[str], str]) -> Any:
    """A marked copy of a call, its JSON arguments opened where they are an object."""
    values = marker.deep(call, guard)
    if not isinstance(call, dict):
        return values
    inner, source = values, call
    if isinstance(call.get("function"), dict):
        inner, source = values["function"], call["function"]
    text = source.get("arguments")
    if isinstance(text, str):
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            return values
        if isinstance(parsed, dict):
            inner["arguments"] = _Arguments(marker.deep(parsed, guard), guard(text))
    return values


def _strings(conversation: Conversation) -> Iterator[str]:
    """Every string of a conversation."""
    for message in conversation.messages:
        yield message.role
        yield message.content
        for text in (message.reasoning_content, message.name, message.tool_call_id):
            if text is not None:
                yield text
        yield from _strings_within(message.tool_calls)
    yield from _strings_within(conversation.tools)
    yield from _strings_within(conversation.tool_choice)
    yield from _strings_within(conversation.template_kwargs)


def _strings_within(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings_within(key)
            yield from _strings_within(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings_within(item)


def _reasoning_key(source: str) -> str:
    """The message key under which a template looks for earlier reasoning."""
    if "reasoning_content" not in source:
        for key in ("thinking", "reasoning"):
            if re.search(rf"message\.{key}\b|['\"]{key}['\"]", source):
                return key
    return "reasoning_content"


def _describe(error: Exception) -> str:
    """What went wrong, in the template's own words where it has some."""
    if isinstance(error, jinja2.TemplateError):
        return error.message or "the chat template refused the conversation"
    return f"the chat template failed: {type(error).__name__}: {error}"


class _GenerationBlock(jinja2.ext.Extension):
    """Accepts `{% generation %}…{% endgeneration %}`, which marks assistant text for training."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up for chat templates, with bounds on what an operator can build."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(left) > 2**32 or abs(right) > 64):
            raise SecurityError("a power is too large")
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int):
                    if len(sequence) * times > MAX_PROMPT_CHARS:
                        raise SecurityError("a repeated text is too long")
        return super().call_binop(context, operator, left, right)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON. Jinja's own filter escapes for HTML, which models were not trained on."""
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if ensure_ascii:
        text = _ESCAPED_MARK.sub(lambda escape: str(json.loads(f'"{escape[0]}"')), text)
    return text


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
