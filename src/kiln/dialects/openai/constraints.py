"""Constraints that this profile does not enforce: an answer without them would not be the one asked for."""

from __future__ import annotations

from typing import Any

from kiln.core.errors import InvalidField
from kiln.wire.openai_chat import ProfileFields
from kiln.wire.openai_text import TextRequest

_SCHEMA = "Send response_format with type json_schema to chat/completions."
_TEXT = (
    "Only JSON is enforced here: send response_format with type json_schema to chat/completions;"
    " a schema of type string may have a pattern or an enum."
)
_TOKENS = "Send logit_bias: -100 keeps a token out."

# Constraints of vLLM, SGLang and llama.cpp, and what to send instead.
FOREIGN = {
    "guided_json": _SCHEMA,
    "guided_regex": _TEXT,
    "guided_choice": _TEXT,
    "guided_grammar": _TEXT,
    "structured_outputs": _TEXT,
    "structural_tag": _TEXT,
    "json_schema": _SCHEMA,
    "grammar": _TEXT,
    "ebnf": _TEXT,
    "regex": _TEXT,
    "allowed_token_ids": _TOKENS,
    "bad_words": _TOKENS,
}

# What asks for nothing may be sent to text completions too.
_EMPTY: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
}


def refuse_foreign(request: ProfileFields) -> None:
    """Raises InvalidField for a constraint of another server; null and the empty list are none."""
    for name, hint in FOREIGN.items():
        if getattr(request, name) not in (None, []):
            raise InvalidField(f"{name} is not supported", param=name, hint=hint)


def refuse_wishes_of_chat(request: TextRequest) -> None:
    """Raises InvalidField for an answer format or tools: a text has no turn that they could shape."""
    for name, empty in _EMPTY.items():
        value = getattr(request, name)
        if value is not None and value not in empty:
            raise InvalidField(
                f"{name} is not supported for text completions",
                param=name,
                hint="Send the request to /v1/openai/chat/completions.",
            )
