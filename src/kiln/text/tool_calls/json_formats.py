"""Formats that write a call as JSON: Hermes and Qwen, Llama 3, and the two of Mistral."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kiln.text.lark import Lark, either, json_of
from kiln.text.scanner import ToolMarkers
from kiln.text.tool_calls.base import (
    Framing,
    Schemas,
    ToolCall,
    ToolFormat,
    calls_of,
    load_json,
    load_object,
    load_sequence,
    new_call,
)


class Hermes(ToolFormat):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, a block a call. Hermes, Qwen 2.5 and 3."""

    name = "hermes"
    markers = ToolMarkers("<tool_call>", "</tool_call>", holds_json=True)

    def is_used_by(self, template_source: str) -> bool:
        return self.markers.open in template_source and self.markers.close in template_source

    def parse(self, body: str, schemas: Schemas) -> tuple[ToolCall, ...] | None:
        call = load_object(body)
        return None if call is None else calls_of([call], "arguments")

    def framing(self, name: str) -> Framing:
        return Framing(f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": ', "}\n</tool_call>")


class Llama3(ToolFormat):
    """`{"name": …, "parameters": {…}}` as the whole answer, or behind `<|python_tag|>`; `;` between calls."""

    name = "llama3"
    markers = ToolMarkers("<|python_tag|>", "", starts=("{",), ends_with_turn=True)
    joiner = "; "

    def is_used_by(self, template_source: str) -> bool:
        return "<|python_tag|>" in template_source or (
            "<|start_header_id|>" in template_source and '"parameters"' in template_source
        )

    def parse(self, body: str, schemas: Schemas) -> tuple[ToolCall, ...] | None:
        values = load_sequence(body, ";")
        if values is None:
            return None
        # Some fine-tunes keep OpenAI's word.
        return calls_of(values, "parameters") or calls_of(values, "arguments")

    def framing(self, name: str) -> Framing:
        return Framing(f'{{"name": {json.dumps(name)}, "parameters": ', "}")


class Mistral(ToolFormat):
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]` to the end of the turn."""

    name = "mistral"
    markers = ToolMarkers("[TOOL_CALLS]", "", ends_with_turn=True)
    joiner = ""

    def is_used_by(self, template_source: str) -> bool:
        return self.markers.open in template_source

    def parse(self, body: str, schemas: Schemas) -> tuple[ToolCall, ...] | None:
        calls = load_json(body)
        return calls_of(calls if isinstance(calls, list) else [calls], "arguments")

    def framing(self, name: str) -> Framing:
        return Framing(f'[TOOL_CALLS][{{"name": {json.dumps(name)}, "arguments": ', "}]")

    def call_rule(self, name: str, parameters: Mapping[str, Any], lark: Lark) -> str:
        before = lark.text(f'{{"name": {json.dumps(name)}, "arguments": ')
        return f"{before} {lark.rule(json_of(dict(parameters)))} {lark.text('}')}"

    def calls_rule(self, calls: Sequence[str], lark: Lark, *, many: bool) -> str:
        call = lark.rule(either(calls))
        more = f" ({lark.text(', ')} {call})*" if many else ""
        return f"{lark.text('[TOOL_CALLS][')} {call}{more} {lark.text(']')}"


class MistralNamed(ToolFormat):
    """`[TOOL_CALLS]name[ARGS]{…}` to the end of the turn, again for each call. Newer Mistral templates."""

    name = "mistral-named"
    markers = ToolMarkers("[TOOL_CALLS]", "", ends_with_turn=True)
    joiner = ""

    def is_used_by(self, template_source: str) -> bool:
        return self.markers.open in template_source and "[ARGS]" in template_source

    def parse(self, body: str, schemas: Schemas) -> tuple[ToolCall, ...] | None:
        calls = []
        for part in body.split(self.markers.open):
            head, found, arguments = part.partition("[ARGS]")
            call = new_call(head.partition("[CALL_ID]")[0].strip(), arguments) if found else None
            if call is None:
                return None
            calls.append(call)
        return tuple(calls)

    def framing(self, name: str) -> Framing:
        return Framing(f"[TOOL_CALLS]{name}[ARGS]", "")
