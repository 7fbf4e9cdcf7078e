"""docs/openai.md names every field that is read or sent."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kiln.wire import openai_chat, openai_text

TEXT = (Path(__file__).parents[2] / "docs" / "openai.md").read_text(encoding="utf-8")
STRUCTS = [
    openai_chat.ChatRequest,
    openai_chat.Reasoning,
    openai_chat.ChatResponse,
    openai_chat.MessageOutput,
    openai_chat.Usage,
    openai_chat.PromptDetails,
    openai_chat.CompletionDetails,
    openai_text.TextRequest,
    openai_text.TextChoice,
    openai_text.TextLogprobs,
    openai_text.EmbeddingRequest,
    openai_text.TokenizeRequest,
    openai_text.TokenizeResponse,
    openai_text.DetokenizeRequest,
]
# What every OpenAI object has, and says nothing about kiln.
USUAL = {"id", "object", "created", "role"}


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_every_field_is_described(struct: type[msgspec.Struct]) -> None:
    for field in msgspec.structs.fields(struct):
        name = field.encode_name
        assert name in USUAL or name in TEXT, name


def test_every_finish_reason_is_described() -> None:
    for name in openai_chat.FinishName.__args__:  # type: ignore[attr-defined]
        assert f"| `{name}` |" in TEXT
