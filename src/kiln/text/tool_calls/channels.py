"""GPT-OSS: calls are messages on the commentary channel, addressed to a function."""

from __future__ import annotations

import re

from kiln.text.scanner import ToolMarkers
from kiln.text.tool_calls.base import Framing, Schemas, ToolCall, ToolFormat, new_call

_CALL = re.compile(
    r"(?:\s*to=functions\.)?([A-Za-z0-9_.-]+)\s*(?:<\|channel\|>commentary)?\s*(?:<\|constrain\|>)?"
    r"(?:json)?\s*<\|message\|>(.*)\Z",
    re.DOTALL,
)


class Harmony(ToolFormat):
    """`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>`.

    The recipient may also stand in the role's header, before the channel. `<|call|>` ends the turn.
    """

    name = "harmony"
    markers = ToolMarkers(
        "<|channel|>commentary to=functions.",
        "<|call|>",
        also_open=("<|start|>assistant to=functions.",),
        starts=("to=functions.",),
        ends_with_turn=True,
    )
    silent = (
        "<|start|>assistant",
        "<|channel|>final<|message|>",
        "<|channel|>final <|constrain|>json<|message|>",
        "<|channel|>commentary<|message|>",
        "<|end|>",
        "<|return|>",
    )
    joiner = after_thought = "<|start|>assistant"
    answer_header = "<|channel|>final<|message|>"

    def is_used_by(self, template_source: str) -> bool:
        return "<|channel|>" in template_source and "<|message|>" in template_source

    def parse(self, body: str, schemas: Schemas) -> tuple[ToolCall, ...] | None:
        found = _CALL.match(body)
        call = None if found is None else new_call(found[1], found[2].strip())
        return None if call is None else (call,)

    def framing(self, name: str) -> Framing:
        return Framing(f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", "<|call|>")
