"""The stream validator accepts good streams and says what is wrong with others."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from contract.validators import schemas, stream_events, validate, validate_chat_stream
from kiln import contracts
from kiln.core.errors import EngineFailed
from kiln.http.problems import error_body

EXAMPLES = schemas()[contracts.INFERENCE]["x-kiln-examples"]
CHUNK, FINISH = EXAMPLES["ChatCompletionChunk"]
USAGE = {**CHUNK, "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}
TIMING = EXAMPLES["StreamingTokenTiming"][0]
DONE = "[DONE]"


def sse(*events: Any) -> bytes:
    texts = (event if isinstance(event, str) else json.dumps(event) for event in events)
    return "".join(f"data: {text}\n\n" for text in texts).encode()


ERROR = json.loads(error_body(EngineFailed("gone")))


@pytest.mark.parametrize(
    "stream",
    [
        sse(CHUNK, FINISH, DONE),
        sse(CHUNK, TIMING, CHUNK, FINISH, USAGE, DONE),
        sse(CHUNK, ERROR),
        sse(ERROR),
        b": waiting\n\n" + sse(FINISH, DONE),
    ],
)
def test_good_streams(stream: bytes) -> None:
    assert validate_chat_stream(stream) == []


@pytest.mark.parametrize(
    ("stream", "problem"),
    [
        (sse(CHUNK, DONE), "no finish_reason"),
        (sse(CHUNK, FINISH), "does not end"),
        (sse(CHUNK, FINISH, DONE, CHUNK), "after the end"),
        (sse(CHUNK, FINISH, FINISH, DONE), "after the finish chunk"),
        (sse(CHUNK, FINISH, CHUNK, DONE), "after the finish chunk"),
        (sse(USAGE, FINISH, DONE), "usage chunk"),
        (sse(FINISH, USAGE, USAGE, DONE), "usage chunk"),
        (sse({**CHUNK, "metadata": FINISH["metadata"]}, FINISH, DONE), "metadata exactly"),
        (sse({k: v for k, v in FINISH.items() if k != "metadata"}, DONE), "metadata exactly"),
        (sse({**FINISH, "usage": USAGE["usage"]}, DONE), "usage beside choices"),
        (sse({**CHUNK, "id": "chatcmpl-other"}, FINISH, DONE), "another id"),
        (sse({**CHUNK, "system_fingerprint": None}, FINISH, DONE), "system_fingerprint"),
        (sse(TIMING, TIMING, FINISH, DONE), "does not rise"),
        (sse({**TIMING, "queue_delay_ms": 9}, FINISH, DONE), "not the sum"),
        (sse({"error": "gone"}), "object"),
        (sse(ERROR, DONE), "after the end"),
        (sse("{"), "not JSON"),
        (b"event: x\ndata: {}\n\n", "one line"),
        (b"data: [DONE]\n", "empty line"),
        (b"", "no finish_reason"),
    ],
)
def test_bad_streams(stream: bytes, problem: str) -> None:
    assert any(problem in error for error in validate_chat_stream(stream)), validate_chat_stream(stream)


def test_expectations_of_a_stream() -> None:
    assert validate_chat_stream(sse(FINISH, USAGE, DONE), include_usage=True) == []
    assert validate_chat_stream(sse(FINISH, USAGE, DONE), include_usage=False) != []
    assert validate_chat_stream(sse(FINISH, DONE), include_usage=True) != []
    assert validate_chat_stream(sse(FINISH, DONE), include_performance=True) != []
    assert stream_events(sse(CHUNK, FINISH, DONE)) == [CHUNK, FINISH]


def _provenance(change: Callable[[Any], object]) -> Any:
    value = json.loads(json.dumps(EXAMPLES["RolloutProvenanceV1"][0]))
    change(value)
    return value


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda p: p.update(prompt_token_count=6), "exceeds"),
        (lambda p: p["action_tokens"].pop(), "every generated id"),
        (lambda p: p["action_tokens"][0].update(sequence_index=1), "every generated id"),
        (lambda p: p["action_tokens"][0].update(token_id=1), "differ"),
        (lambda p: p["sampling"]["thinking_budget"].update(close_token_ids=[8]), "close_token_ids"),
        (lambda p: p["sampling"].pop("thinking_budget"), "close_token_ids"),
        (lambda p: p["sampling"].update(stop=["x" * 16385]), "stop"),
        (lambda p: p["behavior_policy"].update(implementation=" kiln"), "identity"),
        (lambda p: p["behavior_policy"].update(served_model_id="ü" * 129), "identity"),
    ],
)
def test_arithmetic_of_a_provenance(change: Callable[[Any], object], problem: str) -> None:
    errors = validate("RolloutProvenanceV1", _provenance(change))
    assert any(problem in error for error in errors), errors


def test_usage_is_added_up() -> None:
    assert validate("Usage", {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 4}) != []
