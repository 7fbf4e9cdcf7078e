"""A body that does not come: the caller is told, and the place it held is free."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from servers.raw import connected
from servers.server import Server, serving_model


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving_model(server__body_timeout_s=0.3) as running:
        yield running


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/openai/chat/completions", "/lmkit/v1/chat"])
def test_a_body_that_never_ends_is_answered(server: Server, path: str) -> None:
    headers = "host: kiln\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
    with connected(server.url) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\n{headers}{{".encode())
        answer = connection.recv(65536).decode()
    status, _, rest = answer.partition("\r\n")
    assert " 408 " in status
    body = json.loads(rest.partition("\r\n\r\n")[2])
    code = body["code"] if path.startswith("/lmkit") else body["error"]["code"]
    assert code == "body_too_slow"
    assert server.ask(max_tokens=2)["usage"]["completion_tokens"] == 2
