"""Which format a chat template uses."""

from __future__ import annotations

from kiln.text.tool_calls.base import ToolFormat
from kiln.text.tool_calls.channels import Harmony
from kiln.text.tool_calls.json_formats import Hermes, Llama3, Mistral, MistralNamed
from kiln.text.tool_calls.tagged import Qwen3Coder

# The more particular ones first: Qwen3-Coder's tags stand inside those of Hermes.
FORMATS: tuple[ToolFormat, ...] = (
    Harmony(),
    Qwen3Coder(),
    Hermes(),
    MistralNamed(),
    Mistral(),
    Llama3(),
)


def find_tool_format(template_source: str) -> ToolFormat | None:
    """The format of a chat template, None when it names none that kiln can parse."""
    return next((known for known in FORMATS if known.is_used_by(template_source)), None)
