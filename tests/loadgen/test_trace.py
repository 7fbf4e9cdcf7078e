"""One stream from its bytes: exact times, channels, counts, and every way to fail."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.loadgen.client.sse import EventSplitter
from kiln.loadgen.client.trace import ANSWER, REASONING, TOOL_CALL, StreamReceiver, Trace, body_text

from .scripted import DONE, LAST_CHUNK, STREAM_HEAD, chunked, event, trace_of, usage

EVENTS = [
    event({"role": "assistant"}),
    event({"reasoning_content": "hm "}),
    event({"reasoning": "so"}),
    event({"content": "\u2028é"}),
    event({"tool_calls": [{"index": 0}]}),
    event({"content": ""}, finish_reason="stop", metadata={"thinking_budget": {"applied": True}}),
    event(None, usage={**usage(7, 9), "prompt_tokens_details": {"cached_tokens": 4}}),
    DONE,
]


def receive(*reads: tuple[float, bytes]) -> Trace:
    trace = Trace(started_s=1.0)
    receiver = StreamReceiver(trace)
    for now_s, data in reads:
        receiver.feed(data, now_s)
    return trace


def test_times_and_channels_are_those_of_the_chunks_with_text() -> None:
    reads = [(1.0 + n / 10, chunked(piece)) for n, piece in enumerate(EVENTS, 1)]
    trace = receive((1.05, STREAM_HEAD), *reads, (2.5, LAST_CHUNK))
    assert trace.ok and trace.done
    assert trace.times_s == pytest.approx([1.2, 1.3, 1.4, 1.5])
    assert list(trace.channels) == [REASONING, REASONING, ANSWER, TOOL_CALL]
    assert trace.ttft_s == pytest.approx(0.2)
    assert trace.answer_s == pytest.approx(0.4)
    assert trace.e2e_s == pytest.approx(0.8)  # to [DONE], not to the end of the body
    assert (trace.prompt_tokens, trace.completion_tokens, trace.cached_tokens) == (7, 9, 4)
    assert trace.finish_reason == "stop"
    assert trace.budget == {"applied": True}
    assert trace.tpot_s == pytest.approx(0.3 / 8)


@given(st.lists(st.integers(0, 10_000), max_size=40))
def test_reads_may_cut_the_stream_anywhere(cuts: list[int]) -> None:
    data = STREAM_HEAD + chunked(*EVENTS) + LAST_CHUNK
    edges = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    trace = receive(*((float(b), data[a:b]) for a, b in zip(edges, edges[1:], strict=False)))
    assert trace.ok
    assert list(trace.channels) == [REASONING, REASONING, ANSWER, TOOL_CALL]
    assert trace.times_s == sorted(trace.times_s)
    assert trace.completion_tokens == 9


def test_chunks_of_one_read_have_its_time() -> None:
    trace = receive((3.0, STREAM_HEAD + chunked(*EVENTS) + LAST_CHUNK))
    assert trace.times_s == [3.0] * 4
    assert trace.gaps_s() == [0, 0, 0]


def test_gaps_are_within_a_choice() -> None:
    pieces = [(1.0, 0), (1.1, 1), (1.4, 0), (1.6, 1), (1.7, 1)]
    reads = [(now_s, chunked(event({"content": "x"}, index=index))) for now_s, index in pieces]
    trace = receive((1.0, STREAM_HEAD), *reads)
    assert trace.gaps_s() == pytest.approx([0.4, 0.5, 0.1])


def test_completions_text_is_the_answer() -> None:
    body = json.dumps({"choices": [{"index": 0, "text": "hi", "finish_reason": "length"}]}).encode()
    trace = receive((2.0, STREAM_HEAD + chunked(b"data: " + body + b"\n\n") + LAST_CHUNK))
    assert trace.ok and not trace.done  # a finish reason is an end, too
    assert trace.answer_s == 1.0
    assert trace.tokens == 1


@pytest.mark.parametrize(
    ("payload", "channel"),
    [
        ('{"choices":[{"index":0,"delta":{"role":"assistant","content":null},"finish_reason":null}]}', None),
        ('{"choices":[{"index":0,"delta":{"content":"","reasoning":"hm"},"finish_reason":null}]}', REASONING),
        ('{"choices":[{"index":0,"delta":{"content":"a","tool_calls":[]}}],"usage":null}', ANSWER),
        ('{"choices":[{"index":0,"text":"a","logprobs":null,"stop_reason":null}],"usage":null}', ANSWER),
        ('{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2},"timings":{"n":1}}', None),
        ('{"choices":[{"delta":{"content":"a"}}],"error":null,"system_fingerprint":"b1"}', ANSWER),
        ('{"object":"ping"}', None),
    ],
)
def test_chunks_as_servers_write_them(payload: str, channel: int | None) -> None:
    trace = receive((2.0, STREAM_HEAD + chunked(f"data: {payload}\n\n".encode())))
    assert trace.failure is None
    assert list(trace.channels) == ([] if channel is None else [channel])


def test_a_stream_without_answer_has_no_answer_time() -> None:
    assert trace_of([1.0, 2.0], reasoning=2).answer_s is None
    empty = trace_of([])
    assert (empty.ttft_s, empty.tpot_s, empty.gaps_s(), empty.tokens) == (None, None, [], 0)


def sized(status: str, body: bytes, kind: str = "application/json") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (sized("404 Not Found", b'{"error":{"message":"no route"}}'), "http_404", "no route"),
        (sized("503 Busy", b"<h1>busy</h1>", "text/html"), "http_503", "<h1>busy</h1>"),
        (sized("500 Oh", b""), "http_500", "no message"),
        (sized("302 Found", b""), "http_302", "no message"),
        (sized("200 OK", b"{}"), "malformed", "application/json"),
        (STREAM_HEAD + chunked(b"data: {not json}\n\n"), "malformed", "cannot be read"),
        (STREAM_HEAD + chunked(b'data: {"choices": 5}\n\n'), "malformed", "choices"),
        (STREAM_HEAD + b"zz\r\n", "malformed", "size"),
        (b"220 mail.example ESMTP\r\n\r\n", "malformed", "no HTTP"),
        (STREAM_HEAD + chunked(b'data: {"error": {"message": "died"}}\n\n'), "error_event", "died"),
        (STREAM_HEAD + chunked(event({"content": "x"})) + LAST_CHUNK, "cut", "without"),
    ],
)
def test_failures_by_kind(data: bytes, kind: str, message: str) -> None:
    trace = receive((2.0, data))
    assert trace.failure is not None
    assert not trace.ok
    assert trace.failure.kind == kind
    assert message in trace.failure.message
    assert trace.ended_s == 2.0


@pytest.mark.parametrize(
    ("data", "words"), [(b"", "before the answer began"), (STREAM_HEAD, "in the middle")]
)
def test_a_closed_connection_cuts_the_stream(data: bytes, words: str) -> None:
    receiver = StreamReceiver(trace := Trace(started_s=0.0))
    if data:
        receiver.feed(data, 1.0)
    receiver.closed(2.0, "reset by peer")
    assert trace.failure is not None and trace.failure.kind == "cut"
    assert words in trace.failure.message and "reset by peer" in trace.failure.message


def test_a_close_after_done_is_no_failure() -> None:
    receiver = StreamReceiver(trace := Trace(started_s=0.0))
    receiver.feed(STREAM_HEAD + chunked(*EVENTS), 1.0)
    assert receiver.settled
    receiver.closed(2.0, None)
    assert trace.ok and trace.ended_s == 1.0


def test_splitter_takes_both_line_ends_comments_and_long_data() -> None:
    splitter = EventSplitter()
    stream = b": ping\r\n\r\nevent: x\r\ndata: a\r\n\r\ndata:b\ndata: c\n\nid: 1\n\ndata: last\n"
    assert splitter.feed(stream) == [b"a", b"b\nc"]
    assert splitter.finish() == [b"last"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"error": "bad\\nnews"}', "bad news"),
        (b'["x"]', "['x']"),
        (b"\xff", "\ufffd"),
    ],
)
def test_error_bodies_of_any_shape(body: bytes, text: str) -> None:
    assert body_text(body) == text


def test_reading_a_stream_costs_little() -> None:
    piece = event({"content": " answer"}, object="chat.completion.chunk", created=1, model="m")
    receiver = StreamReceiver(trace := Trace(started_s=0.0))
    receiver.feed(STREAM_HEAD, 0.0)
    data = chunked(piece)
    began_s = time.thread_time()
    for n in range(5000):
        receiver.feed(data, float(n))
    assert len(trace.times_s) / (time.thread_time() - began_s) > 20_000
