"""What one connection may cost: heads without end, heads that do not come, and too many connections."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from servers.raw import connected
from servers.scripted import Stage, staging
from servers.server import Server, Streamed, serving_model, wait_until

KIB = 1024
LIMIT = 64 * KIB
MOST = 8
HEAD = b"GET /health HTTP/1.1\r\nhost: kiln\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving_model(server__header_timeout_s=1.0) as running:
        yield running


@pytest.fixture(scope="module")
def crowded() -> Iterator[tuple[Server, Stage]]:
    """A scripted model on a server of few connections."""
    with staging(server__max_connections=MOST, server__header_timeout_s=1.0) as staged:
        yield staged.server, staged.stage


def send(connection: socket.socket, data: bytes) -> None:
    """Send as much as the server takes: it may close meanwhile."""
    with contextlib.suppress(ConnectionError):
        connection.sendall(data)


def read_all(connection: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(65536):
            received += data
    return received


def refusal(received: bytes) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body of an answer that ended its connection."""
    head, _, body = received.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    assert headers["connection"] == "close"
    assert int(headers["content-length"]) == len(body)
    return int(status.split()[1]), headers, json.loads(body)


def admitted(server: Server, path: str) -> httpx.Response:
    """The answer once there is a place: the server notices a moment later that connections are gone."""
    while True:
        response = httpx.get(f"{server.url}{path}", timeout=60)
        if response.status_code != 503:
            return response


def is_served(client: httpx.Client) -> bool:
    return client.get("/health").status_code == 200


def refused(server: Server, code: str) -> float:
    """How many connections were refused with a code so far."""
    lines = admitted(server, "/metrics").text.splitlines()
    name = f'kiln_refused_connections_total{{code="{code}"}} '
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


HUGE = {
    "one field": b"cookie: " + b"a" * 2 * LIMIT + b"\r\n\r\n",
    "many fields": b"".join(b"x-%d: y\r\n" % n for n in range(10_000)) + b"\r\n",
    "a line that does not end": b"cookie: " + b"a" * 16 * LIMIT,
    "a name that does not end": b"a" * 2 * LIMIT,
}


@pytest.mark.parametrize("kind", HUGE)
def test_a_head_that_is_too_large_is_answered(server: Server, kind: str) -> None:
    before = refused(server, "head_too_large")
    with connected(server.url) as connection:
        send(connection, HEAD + HUGE[kind])
        status, _, body = refusal(read_all(connection))
    assert status == 431
    assert body["error"]["code"] == "head_too_large"
    assert "server.max_header_bytes" in body["error"]["hint"]
    assert refused(server, "head_too_large") == before + 1


def test_a_url_is_part_of_the_head_and_the_native_path_has_its_own_body(server: Server) -> None:
    with connected(server.url) as connection:
        send(connection, b"GET /lmkit/v1/models?a=" + b"b" * LIMIT + b" HTTP/1.1\r\nhost: kiln\r\n\r\n")
        status, _, body = refusal(read_all(connection))
    assert (status, body["code"]) == (431, "head_too_large")


def test_heads_within_the_limit_are_served(server: Server) -> None:
    head = HEAD + b"cookie: " + b"a" * (LIMIT - KIB)
    with connected(server.url) as connection:
        for _ in range(3):
            connection.sendall(head + b"\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        connection.sendall(head + b"\r\nconnection: close\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


def test_what_a_refused_client_still_sends_is_heard(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    # Were the connection closed at once, what comes would be answered with a reset, and the answer be lost.
    monkeypatch.setattr("kiln.http.connection._LINGER_S", 60.0)
    with connected(server.url) as connection:
        send(connection, HEAD + HUGE["one field"])
        assert refusal(read_all(connection))[0] == 431
        for _ in range(3):
            connection.sendall(b"a" * KIB)
            time.sleep(0.02)


def test_endless_headers_are_refused_once(server: Server) -> None:
    # Each piece is a whole field, so nothing is left over that only the parser would hold.
    piece = b"".join(b"x-%d: %s\r\n" % (n, b"y" * 1000) for n in range(250))
    before = refused(server, "head_too_large")
    sent = 0
    with connected(server.url) as connection:
        connection.sendall(HEAD)
        with contextlib.suppress(ConnectionError):
            while sent < 60_000_000:
                connection.sendall(piece)
                sent += len(piece)
        received = read_all(connection)
    # The answer can be lost when the client goes on sending for longer than the server listens.
    assert received == b"" or refusal(received)[0] == 431
    assert refused(server, "head_too_large") == before + 1
    assert server.ask(max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("tail", [b"x-trailer: " + b"a" * 4 * LIMIT, b"x-trailer: a\r\n" * 20_000])
def test_a_trailer_is_bounded_like_a_head(server: Server, tail: bytes) -> None:
    before = refused(server, "head_too_large")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: kiln\r\ncontent-type: application/json\r\n"
    with connected(server.url) as connection:
        send(connection, head + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n" + tail)
        read_all(connection)
    assert refused(server, "head_too_large") == before + 1


def test_a_large_body_is_no_large_head(server: Server) -> None:
    assert server.ask(unknown="a" * 3 * LIMIT, max_tokens=2)["usage"]["completion_tokens"] == 2
    message = [{"role": "user", "content": "3+8-2+7=?"}]
    body = json.dumps({"messages": message, "max_tokens": 2, "metadata": {}}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body + b" " * LIMIT)
    head = b"POST /v1/openai/chat/completions HTTP/1.1\r\nhost: kiln\r\ncontent-type: application/json\r\n"
    head += b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    with connected(server.url) as connection:
        connection.sendall(head + chunks + b"0\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


def test_requests_in_one_write_are_all_answered(server: Server) -> None:
    with connected(server.url) as connection:
        connection.sendall((HEAD + b"\r\n") * 5 + HEAD + b"connection: close\r\n\r\n")
        assert read_all(connection).count(b"HTTP/1.1 200 ") == 6


def test_a_head_that_does_not_come_is_answered(server: Server) -> None:
    before = refused(server, "head_too_slow")
    with connected(server.url) as connection:
        connection.sendall(HEAD)
        status, _, body = refusal(read_all(connection))
    assert status == 408
    assert body["error"]["code"] == "head_too_slow"
    assert refused(server, "head_too_slow") == before + 1


def test_dripping_does_not_keep_a_connection(server: Server) -> None:
    stop = threading.Event()
    with connected(server.url) as connection:

        def drip() -> None:
            with contextlib.suppress(OSError):
                while not stop.wait(0.05):
                    connection.sendall(b"x: y\r\n")

        connection.sendall(HEAD)
        thread = threading.Thread(target=drip)
        thread.start()
        try:
            assert b" 408 " in read_all(connection).partition(b"\r\n")[0]
        finally:
            stop.set()
            thread.join()


def test_a_connection_that_says_nothing_is_closed_without_a_word(server: Server) -> None:
    with connected(server.url) as connection:
        assert read_all(connection) == b""


@pytest.mark.parametrize("more", [HEAD, b"\r\n"])
def test_the_second_request_of_a_connection_must_come_in_time_too(server: Server, more: bytes) -> None:
    with connected(server.url) as connection:
        connection.sendall(HEAD + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        connection.sendall(more)
        assert b" 408 " in read_all(connection).partition(b"\r\n")[0]


def test_what_is_not_http_gets_the_body_of_every_error(server: Server) -> None:
    with connected(server.url) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        status, _, body = refusal(read_all(connection))
    assert status == 400
    assert body["error"]["code"] == "malformed_http"


def test_an_upgrade_is_not_taken(server: Server) -> None:
    upgrade = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    with connected(server.url) as connection:
        connection.sendall(HEAD + upgrade + b"sec-websocket-key: YWJjZGVmZ2hpamtsbW5vcA==\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_flood_is_turned_away_and_a_stream_beside_it_goes_on(crowded: tuple[Server, Stage]) -> None:
    server, stage = crowded
    flooded = threading.Event()

    def once_flooded() -> int:
        assert flooded.wait(60)
        return stage.token("2")

    stage.say("1", [once_flooded], "3")
    body = {"messages": [{"role": "user", "content": "count"}], "stream": True}
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=server.url, timeout=60))
        response = stack.enter_context(client.stream("POST", "/v1/chat/completions", json=body))
        lines = response.iter_lines()
        received = [next(lines)]
        flood = [stack.enter_context(connected(server.url)) for _ in range(MOST + 200)]
        send(flood[0], HEAD + HUGE["many fields"])
        answers = [read_all(connection) for connection in flood]
        flooded.set()
        received.extend(lines)
    streamed = Streamed.parse("\n".join([*received, ""]).encode())
    assert streamed.done and "".join(streamed.texts("reasoning_content")) + streamed.content == "123"
    spoken = [refusal(answer) for answer in answers if b" 503 " in answer.partition(b"\r\n")[0]]
    assert spoken and all(headers["retry-after"] == "1" for _, headers, _ in spoken)
    assert {body["error"]["code"] for _, _, body in spoken} == {"too_many_connections"}
    # The places are free again, and those that were closed without a word are counted too.
    assert refused(server, "too_many_connections") >= 200


def test_a_client_beyond_the_limit_is_told_so(crowded: tuple[Server, Stage]) -> None:
    server, _ = crowded
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(httpx.Client(base_url=server.url, timeout=60)) for _ in range(MOST)]
        for client in held:
            wait_until(partial(is_served, client), "there is a place")
        response = httpx.get(f"{server.url}/health", timeout=60)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
    assert admitted(server, "/health").status_code == 200


def test_a_refused_client_does_not_stay(server: Server) -> None:
    # It reads its answer, but never closes: the server does.
    with connected(server.url) as connection:
        send(connection, HEAD + HUGE["many fields"])
        assert b" 431 " in read_all(connection).partition(b"\r\n")[0]

        def is_closed() -> bool:
            try:
                connection.sendall(b"x")
            except ConnectionError:
                return True
            return False

        wait_until(is_closed, "the server has closed the connection")
