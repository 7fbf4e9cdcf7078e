"""docs/native.md names every field and event there is, and its transcripts have the shapes of today."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from kiln.wire import lmkit as wire
from servers.traffic import NATIVE_PAYLOADS, native_payload_problems

TEXT = (Path(__file__).parents[2] / "docs" / "native.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return re.split(r"^##+ ", TEXT, flags=re.MULTILINE)[_titles().index(title) + 1]


def _titles() -> list[str]:
    return re.findall(r"^##+ (.*)$", TEXT, re.MULTILINE)


def named(text: str, column: int = 0) -> set[str]:
    """Names in code type in a column of a section's table."""
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row[column])}


@pytest.mark.parametrize(
    ("title", "struct"),
    [
        ("Request", wire.NativeChatRequest),
        ("Messages", wire.NativeMessage),
        ("The summary", wire.DoneEvent),
    ],
)
def test_every_field_is_named(title: str, struct: type[msgspec.Struct]) -> None:
    assert named(section(title)) == set(struct.__struct_fields__)


def test_every_event_is_named_with_its_fields() -> None:
    text = section("Streaming")
    assert named(text) == set(NATIVE_PAYLOADS) - {"answer"}
    for line in text.splitlines():
        found = re.match(r"\| `(\w+)` \| (.*?) \|", line)
        if found and found[1] != "done":
            fields = NATIVE_PAYLOADS[found[1]].__struct_fields__
            assert re.findall(r"`(\w+)`", found[2]) == list(fields)


def test_the_transcripts_are_of_today() -> None:
    events = re.findall(r"^event: (\w+)\ndata: (.*)$", TEXT, re.MULTILINE)
    assert {name for name, _ in events} >= {"status", "delta", "tool_use", "done"}
    for name, data in events:
        assert native_payload_problems(name, json.loads(data)) == []
    answers = re.findall(r'^\{"result".*$', TEXT, re.MULTILINE)
    assert len(answers) == 3
    for answer in answers:
        assert native_payload_problems("answer", json.loads(answer)) == []
    for request in re.findall(r'^\{"messages".*$', TEXT.split("## Errors")[0], re.MULTILINE):
        msgspec.json.decode(request, type=wire.NativeChatRequest)
