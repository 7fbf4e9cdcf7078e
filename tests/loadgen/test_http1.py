from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.loadgen.client.http1 import BadResponse, ResponseParser

from .scripted import LAST_CHUNK, STREAM_HEAD, chunked

BODIES = [b"data: a\n\n", b"x", "é—\r\n0\r\n\r\n".encode(), b"y" * 300]
CHUNKED = STREAM_HEAD + chunked(*BODIES) + LAST_CHUNK
SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


def feed_in_pieces(data: bytes, cuts: list[int]) -> tuple[ResponseParser, bytes]:
    parser = ResponseParser()
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    body = b"".join(parser.feed(data[a:b]) for a, b in zip(edges, edges[1:], strict=False))
    return parser, body


@given(st.lists(st.integers(0, 10_000), max_size=30))
def test_chunks_are_joined_wherever_the_reads_cut_them(cuts: list[int]) -> None:
    parser, body = feed_in_pieces(CHUNKED, cuts)
    assert body == b"".join(BODIES)
    assert parser.complete and parser.reusable
    assert parser.status == 200
    assert parser.headers["content-type"] == "text/event-stream"


def test_byte_by_byte() -> None:
    for data, expected in ((CHUNKED, b"".join(BODIES)), (SIZED, b"hello")):
        parser, body = feed_in_pieces(data, list(range(len(data))))
        assert body == expected
        assert parser.complete


@pytest.mark.parametrize(
    ("data", "body", "reusable"),
    [
        (SIZED, b"hello", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b"", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED, b"hello", True),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\ncontent-length: 2\r\n\r\nok", b"ok", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok", b"ok", False),
        (SIZED + b"more", b"hello", False),
        (STREAM_HEAD + b"2;ext=1\r\nok\r\n0\r\nTrailer: x\r\n\r\n", b"ok", True),
        (STREAM_HEAD + b"0A\r\n0123456789\r\n0\r\n\r\n", b"0123456789", True),
    ],
)
def test_framings(data: bytes, body: bytes, reusable: bool) -> None:
    parser = ResponseParser()
    assert parser.feed(data) == body
    assert parser.complete
    assert parser.reusable is reusable


def test_a_body_without_length_ends_with_the_connection() -> None:
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.1 200 OK\r\n\r\nto the ") == b"to the "
    assert parser.feed(b"end") == b"end"
    assert not parser.complete
    parser.end_of_input()
    assert parser.complete and not parser.reusable


def test_a_chunked_body_is_not_complete_where_the_connection_ends() -> None:
    parser = ResponseParser()
    parser.feed(STREAM_HEAD + chunked(b"abc"))
    parser.end_of_input()
    assert not parser.complete


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        STREAM_HEAD + b"zz\r\n",
        STREAM_HEAD + b"-5\r\n",
        STREAM_HEAD + b"fffffffffffff\r\n",
        STREAM_HEAD + b"a" * 300,
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000,
    ],
)
def test_what_is_no_response_is_refused(data: bytes) -> None:
    with pytest.raises(BadResponse):
        ResponseParser().feed(data)
