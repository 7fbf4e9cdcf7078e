"""The stream's events and the meaning of Ctrl-C, without network or terminal."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.cli.chat.exchange import ChatError, Exchange, Phase, error_text, read_events, summarize


def chunk(delta: dict[str, Any] | None = None, **rest: Any) -> dict[str, Any]:
    return {"id": "chatcmpl-7", "choices": [{"index": 0, "delta": delta or {}}], **rest}


THOUGHT = chunk({"reasoning_content": "hm"})
ANSWER = chunk({"content": "4"})


async def events_of(parts: Sequence[bytes]) -> list[dict[str, Any]]:
    async def stream() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    return [event async for event in read_events(stream())]


STREAM = (
    b': hello\r\n\r\nevent: x\r\ndata: {"a": 1}\r\n\r\n'
    + 'data: {"t": "\u2028\u0085"}\n\ndata:{"b":\ndata: 2}\n\ndata: [DONE]\n\ndata: {"after": 1}\n\n'.encode()
)
EVENTS = [{"a": 1}, {"t": "\u2028\u0085"}, {"b": 2}]


async def test_events_are_read_up_to_the_sentinel() -> None:
    assert await events_of([STREAM]) == EVENTS
    assert await events_of([bytes([byte]) for byte in STREAM]) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
async def test_events_do_not_depend_on_where_reads_end(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    assert await events_of([STREAM[a:b] for a, b in zip(edges, edges[1:], strict=False)]) == EVENTS


@pytest.mark.parametrize("stream", [b"", b'data: {"a": 1}\n\n', b"data: {\n\n", b"data: 5\n\n"])
async def test_a_stream_that_breaks_off_or_is_no_json_is_an_error(stream: bytes) -> None:
    with pytest.raises(ChatError):
        await events_of([stream])


def test_phases_follow_the_deltas() -> None:
    exchange = Exchange(0.0)
    assert exchange.accept(chunk({"role": "assistant"}), 1.0) == []
    assert exchange.phase.value == "waiting"
    assert [p.text for p in exchange.accept(THOUGHT, 2.0)] == ["hm"]
    assert exchange.phase.value == "thinking"
    assert (exchange.thinking_tokens(), exchange.thinking_s(3.5)) == (1, 1.5)
    assert [p.phase for p in exchange.accept(ANSWER, 4.0)] == [Phase.ANSWERING]
    assert (exchange.answer, exchange.thinking_s(9.0)) == ("4", 2.0)
    final = chunk(metadata={"thinking_budget": {"thinking_tokens": 0, "thinking_time_ms": 0}})
    exchange.accept(final, 5.0)
    assert (exchange.thinking_tokens(), exchange.thinking_s(9.0)) == (0, 0.0)


def test_first_interrupt_skips_and_second_cancels() -> None:
    exchange = Exchange(0.0)
    exchange.accept(THOUGHT, 1.0)
    assert exchange.skip_due() is None
    assert exchange.interrupt() is False
    assert exchange.skip_due() == "chatcmpl-7"
    assert exchange.skip_due() is None
    assert exchange.interrupt() is True
    assert exchange.cancelled


def test_an_interrupt_during_the_answer_cancels() -> None:
    exchange = Exchange(0.0)
    exchange.accept(ANSWER, 1.0)
    assert exchange.interrupt() is True


def test_an_interrupt_before_the_first_token_waits_for_thinking() -> None:
    exchange = Exchange(0.0)
    assert exchange.interrupt() is False
    assert exchange.skip_due() is None
    exchange.accept(THOUGHT, 1.0)
    assert exchange.skip_due() == "chatcmpl-7"


def test_an_interrupt_before_the_first_token_skips_nothing_where_nothing_is_thought() -> None:
    exchange = Exchange(0.0)
    exchange.interrupt()
    exchange.accept(ANSWER, 1.0)
    assert exchange.skip_due() is None
    assert exchange.interrupt() is True


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ({}, "thought about 1 token in 2.0 s · 5 completion tokens · 2.0 tokens/s"),
        (
            {
                "configured": True,
                "applied": True,
                "trigger": "tokens",
                "thinking_tokens": 16,
                "thinking_time_ms": 80,
            },
            "thought 16 tokens in 0.1 s (closed by the token budget) · 5 completion tokens · 2.0 tokens/s",
        ),
        (
            {"configured": True, "applied": True, "trigger": "max_tokens", "thinking_tokens": 2},
            "thought 2 tokens in 2.0 s (closed by max_tokens) · 5 completion tokens · 2.0 tokens/s",
        ),
    ],
)
def test_the_summary_says_what_closed_the_thinking(budget: dict[str, Any], expected: str) -> None:
    exchange = Exchange(0.0)
    exchange.accept(THOUGHT, 1.0)
    exchange.accept(ANSWER, 3.0)
    last = {"choices": [{"finish_reason": "stop"}], "metadata": {"thinking_budget": budget}}
    exchange.accept(last | {"usage": {"completion_tokens": 5}}, 3.0)
    assert summarize(exchange) == expected


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"error": {"message": "bad", "hint": "Mend it."}}, "bad (Mend it.)"),
        ({"error": {"message": "bad"}}, "bad"),
        ({"error": "bad", "code": "x"}, "bad"),
        ("bad", "bad"),
    ],
)
def test_error_bodies_of_any_shape_give_a_message(body: object, text: str) -> None:
    assert error_text(body) == text
