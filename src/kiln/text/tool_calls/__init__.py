"""Tool calls as models write them: one format a family, chosen by the chat template."""

from __future__ import annotations

from kiln.text.tool_calls.base import Framing, Schemas, ToolCall, ToolFormat
from kiln.text.tool_calls.choose import FORMATS, find_tool_format

__all__ = ["FORMATS", "Framing", "Schemas", "ToolCall", "ToolFormat", "find_tool_format"]
