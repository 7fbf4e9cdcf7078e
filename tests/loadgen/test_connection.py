"""The client against real sockets: odd reads, keep-alive, cut streams, silence."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from kiln.core.errors import ConfigError
from kiln.loadgen.client import connection
from kiln.loadgen.client.connection import Client
from kiln.loadgen.client.target import Target, explain, parse_target
from kiln.loadgen.client.trace import Failure, Trace
from kiln.loadgen.load import run

from .scripted import DONE, LAST_CHUNK, STREAM_HEAD, chunked, event, raw_server, usage

ROUTE = "/chat/completions"
EVENTS = [event({"reasoning_content": "hm"}), event({"content": "ja"}, finish_reason="stop")]
WHOLE = STREAM_HEAD + chunked(*EVENTS, event(None, usage=usage(3, 2)), DONE) + LAST_CHUNK


def ask(url: str, times: int = 1, timeout_s: float = 5.0) -> list[Trace]:
    """Requests one after the other, with one client."""

    async def asking() -> list[Trace]:
        client = Client(parse_target(url, timeout_s=timeout_s))
        traces = [await client.stream(ROUTE, b"{}") for _ in range(times)]
        client.close()
        return traces

    return run(asking())


def failure_of(trace: Trace) -> Failure:
    assert trace.failure is not None
    return trace.failure


def test_a_stream_cut_at_odd_bytes_is_read_whole() -> None:
    pieces: list[bytes | float | None] = []
    for start in range(0, len(WHOLE), 37):
        pieces += [WHOLE[start : start + 37], 0.001]
    with raw_server(pieces) as url:
        (trace,) = ask(url)
    assert trace.ok
    assert trace.completion_tokens == 2
    assert trace.ttft_s is not None and trace.answer_s is not None and trace.e2e_s is not None
    assert 0 < trace.ttft_s <= trace.answer_s <= trace.e2e_s


def test_a_connection_is_kept_for_the_next_request() -> None:
    # A second connection would be answered with an error.
    with raw_server([WHOLE, None, WHOLE], [b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n"]) as url:
        assert [trace.ok for trace in ask(url, 2)] == [True, True]


def test_a_kept_connection_that_the_server_closed_is_replaced() -> None:
    with raw_server([WHOLE], [WHOLE]) as url:
        assert [trace.ok for trace in ask(url, 3)] == [True, True, True]


def test_a_cut_stream_is_a_failure_that_keeps_its_times() -> None:
    with raw_server([STREAM_HEAD + chunked(EVENTS[0])]) as url:
        (trace,) = ask(url)
    assert failure_of(trace).kind == "cut"
    assert len(trace.times_s) == 1


def test_a_server_that_closes_without_a_word() -> None:
    with raw_server([]) as url:
        assert failure_of(ask(url)[0]).kind == "cut"


def test_a_server_that_never_answers_times_out() -> None:
    with raw_server([30.0]) as url:
        (trace,) = ask(url, timeout_s=0.2)
    assert failure_of(trace).kind == "timeout"
    # The loop's timers may be a little early.
    assert trace.e2e_s is not None and trace.e2e_s > 0.15


def test_a_stream_that_stalls_times_out() -> None:
    with raw_server([STREAM_HEAD + chunked(EVENTS[0]), 30.0]) as url:
        (trace,) = ask(url, timeout_s=0.3)
    assert failure_of(trace).kind == "timeout"
    assert len(trace.times_s) == 1


def test_a_stream_that_is_done_but_does_not_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "DONE_GRACE_S", 0.05)
    with raw_server([STREAM_HEAD + chunked(*EVENTS, DONE), 30.0]) as url:
        began = time.monotonic()
        traces = ask(url, 2, timeout_s=20)
    assert all(trace.ok for trace in traces)
    assert time.monotonic() - began < 10


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    (trace,) = ask(f"http://127.0.0.1:{port}")
    assert failure_of(trace).kind == "connect"


def test_a_cancelled_request_closes_its_connection() -> None:
    async def cancelling(url: str) -> Trace:
        client = Client(parse_target(url))
        trace = Trace(started_s=0.0)
        task = asyncio.ensure_future(client.stream(ROUTE, b"{}", trace))
        while not trace.times_s:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not client._idle
        return trace

    with raw_server([STREAM_HEAD + chunked(EVENTS[0]), 30.0]) as url:
        assert run(cancelling(url)).ended_s is None


def test_headers_carry_the_key_and_the_host() -> None:
    target = Target("::1", 80, False, "/v1", api_key="secret")
    head = Client(target)._head("POST", ROUTE, 2).decode()
    assert head.startswith("POST /v1/chat/completions HTTP/1.1\r\nhost: [::1]:80\r\n")
    assert "authorization: Bearer secret\r\n" in head
    assert "authorization" not in Client(Target("h", 80, False, "/v1"))._head("GET", "/models", 0).decode()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8420", "http://127.0.0.1:8420/v1"),
        ("http://host/", "http://host:80/v1"),
        ("https://host/api/v1/", "https://host:443/api/v1"),
        ("http://host:1/v1/openai", "http://host:1/v1/openai"),
        ("http://host:1/v1/chat/completions", "http://host:1/v1"),
        ("http://host:1/v1/completions", "http://host:1/v1"),
        ("http://[::1]:5", "http://[::1]:5/v1"),
        ("127.0.0.1:8420", "http://127.0.0.1:8420/v1"),
        ("host:1/v1/openai", "http://host:1/v1/openai"),
        ("host", "http://host:80/v1"),
    ],
)
def test_addresses(url: str, expected: str) -> None:
    assert parse_target(url).url == expected


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://h:x", "http://h/a b"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="no address"):
        parse_target(url)


def test_a_key_must_fit_a_header() -> None:
    with pytest.raises(ConfigError, match="key"):
        parse_target("http://h", api_key="a\r\nb")


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        ("connect", "host and port"),
        ("timeout", "--timeout"),
        ("malformed", "/v1"),
        ("http_404", "--model"),
        ("http_401", "--api-key"),
        ("http_429", "--rate"),
        ("http_422", "--body"),
        ("http_500", "log"),
        ("cut", "log"),
        ("error_event", "log"),
    ],
)
def test_every_failure_has_a_remedy(kind: str, hint: str) -> None:
    error = explain(Failure(kind, "so it is"), parse_target("http://h:1"), ROUTE)
    assert "so it is" in error.message
    assert hint in str(error.hint)
