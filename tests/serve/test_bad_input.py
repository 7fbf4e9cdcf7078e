"""Requests that are wrong in every way: each is refused with the field named, none is a server error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import pytest

from servers import traffic
from servers.raw import connected
from servers.server import PROMPT, Server, serving_model

JSON = {"content-type": "application/json"}
BIG = 2**64

BOOLEANS = [
    "ignore_eos",
    "stream",
    "fold_reasoning_into_content",
    "include_performance",
    "include_config_hashes",
    "rollout_provenance",
]
NUMBERS = [
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
]
NATURALS = [
    "n",
    "top_k",
    "max_tokens",
    "max_completion_tokens",
    "thinking_budget_tokens",
    "thinking_budget_ms",
    "seed",
]


@pytest.fixture(scope="module")
def victims() -> Iterator[ExitStack]:
    with ExitStack() as running:
        yield running


@pytest.fixture
def server(victims: ExitStack) -> Server:
    """The bundled model. Another server takes over where a request has killed one, so that it fails alone."""
    if not _victim or _victim[-1].client.get("/health").status_code != 200:
        _victim.append(victims.enter_context(serving_model()))
    return _victim[-1]


_victim: list[Server] = []


@pytest.fixture(autouse=True)
def it_still_answers(server: Server) -> Iterator[None]:
    yield
    assert server.client.get("/health").json() == {"status": "ok"}
    assert server.ask(max_tokens=3)["usage"]["completion_tokens"] == 3


def refuse(server: Server, body: Any, status: int, code: str, param: str | None) -> None:
    response = send(server, body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error
    assert error["hint"]
    assert len(error["message"]) < 1000


def send(server: Server, body: Any) -> Any:
    if isinstance(body, dict):
        body = json.dumps({"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, **body})
    return server.client.post(traffic.CHAT, content=body, headers=JSON)


@pytest.mark.parametrize("name", NATURALS)
@pytest.mark.parametrize("value", ["1", 1.5, True, -1, [], {}, "unlimited", ""])
def test_whole_numbers(server: Server, name: str, value: object) -> None:
    refuse(server, {name: value}, 400, "invalid_field", name)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["1", True, [], {}, "", "NaN"])
def test_numbers(server: Server, name: str, value: object) -> None:
    refuse(server, {name: value}, 400, "invalid_field", name)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "nan", "1e999", "-1e999", "9" * 400])
def test_numbers_that_are_not_finite(server: Server, name: str, literal: str) -> None:
    body = f'{{"messages":[{{"role":"user","content":"1"}}],"{name}":{literal}}}'
    response = send(server, body)
    assert response.status_code == 400
    error = response.json()["error"]
    expected = ("invalid_field", name) if literal[-1].isdigit() else ("invalid_json", None)
    assert (error["code"], error["param"]) == expected


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [-5, 0, 1e-300, 1e300, 7, -0.0])
def test_any_finite_number_is_taken(server: Server, name: str, value: float) -> None:
    assert send(server, {name: value}).status_code == 200


@pytest.mark.parametrize("name", BOOLEANS)
@pytest.mark.parametrize("value", ["true", 1, 0, [], {}])
def test_booleans(server: Server, name: str, value: object) -> None:
    refuse(server, {name: value}, 400, "invalid_field", name)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": None}, "messages"),
        ({"ignore_eos": None}, "ignore_eos"),
        ({"stream": None}, "stream"),
        ({"rollout_provenance": None}, "rollout_provenance"),
        ({"messages": [None]}, "messages[0]"),
        ({"messages": [{"role": None, "content": "x"}]}, "messages[0].role"),
        ({"stream_options": {"include_usage": None}}, "stream_options.include_usage"),
        ({"adapters": [None]}, "adapters[0]"),
        ({"adapters": [{"name": "a", "scale": None}]}, "adapters[0].scale"),
        ({"stop": [None]}, "stop[0]"),
    ],
)
def test_null_where_it_is_not_allowed(server: Server, body: dict[str, Any], param: str) -> None:
    refuse(server, body, 400, "invalid_field", param)


@pytest.mark.parametrize(
    "name",
    [
        *NUMBERS,
        *NATURALS,
        "model",
        "sampling_preset",
        "stop",
        "stream_options",
        "adapter",
        "adapters",
        "tools",
        "tool_choice",
        "chat_template_kwargs",
        "fold_reasoning_into_content",
        "include_performance",
        "include_config_hashes",
    ],
)
def test_null_where_it_is_allowed(server: Server, name: str) -> None:
    assert send(server, {name: None}).status_code == 200


SHAPES: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({"messages": "hello"}, 400, "invalid_field", "messages"),
    ({"messages": {"role": "user"}}, 400, "invalid_field", "messages"),
    ({"messages": ["hello"]}, 400, "invalid_field", "messages[0]"),
    ({"messages": [{"content": "hello"}]}, 400, "invalid_field", "messages[0].role"),
    ({"messages": [{"role": 1, "content": "x"}]}, 400, "invalid_field", "messages[0].role"),
    ({"messages": [{"role": "user", "content": 7}]}, 400, "invalid_field", "messages[0].content"),
    ({"messages": [{"role": "user", "content": {}}]}, 400, "invalid_field", "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        400,
        "invalid_field",
        "messages[0].content",
    ),
    ({"messages": [{"role": "user", "content": "x", "name": 5}]}, 400, "invalid_field", "messages[0].name"),
    (
        {"messages": [{"role": "assistant", "tool_calls": "x"}]},
        400,
        "invalid_field",
        "messages[0].tool_calls",
    ),
    (
        {"messages": [{"role": "assistant", "reasoning_content": []}]},
        400,
        "invalid_field",
        "messages[0].reasoning_content",
    ),
    ({"model": 5}, 400, "invalid_field", "model"),
    ({"model": "gpt-9"}, 404, "model_not_found", "model"),
    ({"model": ""}, 404, "model_not_found", "model"),
    ({"n": 0}, 400, "invalid_field", "n"),
    ({"n": 65}, 400, "invalid_field", "n"),
    ({"n": 2, "stream": True}, 400, "invalid_field", "n"),
    ({"n": 2**70}, 400, "invalid_field", "n"),
    ({"seed": BIG}, 400, "invalid_field", "seed"),
    ({"seed": 10**300}, 400, "invalid_field", "seed"),
    ({"seed": -1}, 400, "invalid_field", "seed"),
    ({"top_k": 2**32}, 400, "invalid_field", "top_k"),
    ({"top_k": BIG}, 400, "invalid_field", "top_k"),
    ({"stop": 5}, 400, "invalid_field", "stop"),
    ({"stop": [5]}, 400, "invalid_field", "stop[0]"),
    ({"stop": {}}, 400, "invalid_field", "stop"),
    ({"stop": ""}, 400, "invalid_field", "stop"),
    ({"stop": ["a", ""]}, 400, "invalid_field", "stop"),
    ({"stop": [f"s{i}" for i in range(300)]}, 400, "invalid_field", "stop"),
    ({"stop": ["x" * 20_000]}, 400, "invalid_field", "stop"),
    ({"stop": "x" * 20_000}, 400, "invalid_field", "stop"),
    ({"stop": "</think>", "thinking_budget_tokens": 1}, 400, "stop_overlaps_thinking_close", "stop"),
    ({"tools": {}}, 400, "invalid_field", "tools"),
    ({"tools": "add"}, 400, "invalid_field", "tools"),
    ({"chat_template_kwargs": []}, 400, "invalid_field", "chat_template_kwargs"),
    ({"chat_template_kwargs": "x"}, 400, "invalid_field", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, 400, "invalid_field", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tools": []}}, 400, "invalid_field", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"add_generation_prompt": 0}}, 400, "invalid_field", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"bos_token": "x"}}, 400, "invalid_field", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"eos_token": "x"}}, 400, "invalid_field", "chat_template_kwargs"),
    ({"stream_options": []}, 400, "invalid_field", "stream_options"),
    ({"stream_options": {"include_usage": 1}}, 400, "invalid_field", "stream_options.include_usage"),
    ({"adapter": 1}, 400, "invalid_field", "adapter"),
    ({"adapter": "math"}, 404, "adapter_not_found", "adapter"),
    ({"adapter": "math", "adapters": None}, 404, "adapter_not_found", "adapter"),
    ({"adapters": "math"}, 400, "invalid_field", "adapters"),
    ({"adapters": [{"name": "", "scale": 1}]}, 400, "invalid_field", "adapters[0].name"),
    ({"adapters": [{"scale": 1}]}, 400, "invalid_field", "adapters[0].name"),
    ({"adapters": [{"name": "a"}]}, 400, "invalid_field", "adapters[0].scale"),
    ({"adapters": [{"name": "a", "scale": "1"}]}, 400, "invalid_field", "adapters[0].scale"),
    ({"adapters": [{"name": "a", "scale": 1}]}, 404, "adapter_not_found", "adapters[0].name"),
    ({"adapter": "a", "adapters": [{"name": "b", "scale": 1}]}, 400, "invalid_field", "adapters"),
    ({"adapter": None, "adapters": [{"name": "b", "scale": 1}]}, 400, "invalid_field", "adapters"),
    ({"adapter": "", "adapters": []}, 400, "invalid_field", "adapters"),
    (
        {"messages": [{"role": "user", "content": "7" * 5000}]},
        400,
        "context_length_exceeded",
        "messages",
    ),
]


@pytest.mark.parametrize(("body", "status", "code", "param"), SHAPES)
def test_shapes(server: Server, body: dict[str, Any], status: int, code: str, param: str | None) -> None:
    refuse(server, body, status, code, param)


@pytest.mark.parametrize(
    "body",
    [
        {"model": "m" * 100_000},
        {"adapter": "m" * 100_000},
        {"adapters": [{"name": "m" * 100_000, "scale": 1}]},
        {"stop": "m" * 16_000 + "</think>", "thinking_budget_tokens": 1},
    ],
)
def test_refusals_do_not_echo_at_length(server: Server, body: dict[str, Any]) -> None:
    response = send(server, body)
    assert response.status_code in (400, 404)
    assert len(response.json()["error"]["message"]) < 1000


@pytest.mark.parametrize(("body", "status", "code", "param"), SHAPES)
def test_streams_are_refused_alike(
    server: Server, body: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    if body.get("n") != 2:
        refuse(server, {"stream": True, **body}, status, code, param)


RAW: list[tuple[str, bytes, int, str, str | None]] = [
    ("empty", b"", 400, "invalid_json", None),
    ("blank", b" \n\t ", 400, "invalid_json", None),
    ("an array", b"[]", 400, "invalid_field", None),
    ("a string", b'"hello"', 400, "invalid_field", None),
    ("null", b"null", 400, "invalid_field", None),
    ("a number", b"5", 400, "invalid_field", None),
    ("an empty object", b"{}", 400, "invalid_field", "messages"),
    ("cut", b'{"messages":[{"role":"user","content":"x"', 400, "invalid_json", None),
    ("two objects", b'{"messages":[]} {"messages":[]}', 400, "invalid_json", None),
    ("trailing comma", b'{"messages":[],}', 400, "invalid_json", None),
    ("single quotes", b"{'messages':[]}", 400, "invalid_json", None),
    ("a form", b"messages=1", 400, "invalid_json", None),
    ("invalid UTF-8", b'{"messages":[{"role":"user","content":"\xff\xfe"}]}', 400, "invalid_json", None),
    ("cut UTF-8", b'{"messages":[{"role":"user","content":"\xe6\x97"}]}', 400, "invalid_json", None),
    ("surrogates", b'{"messages":[{"role":"user","content":"\xed\xa0\x80"}]}', 400, "invalid_json", None),
    ("UTF-16", '{"messages":[]}'.encode("utf-16"), 400, "invalid_json", None),
    ("deep arrays", b'{"messages":' + b"[" * 100_000, 400, "invalid_field", "messages[0]"),
    (
        "deep arguments",
        b'{"messages":[],"chat_template_kwargs":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
        400,
        "invalid_json",
        None,
    ),
    ("deep objects", b'{"messages":[],"tools":[' + b'{"a":' * 100_000, 400, "invalid_json", None),
    ("deep unknown", b'{"messages":[],"x":' + b"[" * 100_000 + b"]" * 100_000, 400, "invalid_json", None),
]


@pytest.mark.parametrize(("body", "status", "code", "param"), [r[1:] for r in RAW], ids=[r[0] for r in RAW])
def test_raw_bodies(server: Server, body: bytes, status: int, code: str, param: str | None) -> None:
    refuse(server, body, status, code, param)


@pytest.mark.parametrize("escape", ["\\ud800", "\\udfff", "\\ude00\\ud83d", "a\\ud83d"])
@pytest.mark.parametrize("field", ['"content":"%s"', '"content":"","name":"%s"', '"content":[{"text":"%s"}]'])
def test_lone_surrogates(server: Server, escape: str, field: str) -> None:
    body = '{"messages":[{"role":"user",%s}],"max_tokens":4}' % (field % escape)
    response = send(server, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "invalid_json" and "half of a surrogate pair" in error["message"]
    assert error["param"].startswith("messages[0].")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (
            '{"messages":[{"role":"user","content":"ab\\ud83d"}]}',
            "messages[0].content",
            r"`messages[0].content` has half of a surrogate pair, \ud83d, as character 3",
        ),
        ('{"messages":[],"x":{"a\\udc00":1}}', "x", r"the name of a member of `x` has half of"),
        ('{"\\ud800":1}', None, r"the name of a member of the body has half of"),
        ('{"x":{"%s":"\\ud800"}}' % ("a" * 5000), "x." + "a" * 197 + "…", "aa…` has half of"),
        # A whole pair is a character; an escaped backslash begins no escape; what is cut is called that.
        ('{"y":"\\ud83d\\ude00 \\\\ud83d","x":"\\udead"}', "x", r"\udead, as character 1"),
        ('{"messages":[{"role":"user","content":"\\ud83d', None, "truncated"),
        ('{"x":' + "[" * 3000 + '"\\ud800"' + "]" * 3000 + "}", None, "nested too deeply"),
    ],
)
def test_a_lone_surrogate_is_called_one_and_placed(
    server: Server, body: str, param: str | None, words: str
) -> None:
    error = send(server, body).json()["error"]
    assert error["code"] == "invalid_json"
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    "kind", [None, "", "text/plain", "application/x-www-form-urlencoded", "application/jsonl", "multipart/x"]
)
def test_content_types(server: Server, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    body = b'{"messages":[{"role":"user","content":"1"}],"max_tokens":2}'
    response = server.client.post(traffic.CHAT, content=body, headers=headers)
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON", "application/json; charset=utf-8", "application/json ;x"]
)
def test_content_types_that_are_json(server: Server, kind: str) -> None:
    body = b'{"messages":[{"role":"user","content":"1"}],"max_tokens":2}'
    response = server.client.post(traffic.CHAT, content=body, headers={"content-type": kind})
    assert response.status_code == 200


def test_a_body_that_is_too_large(server: Server) -> None:
    """Announced or not, it is refused; the connection is not just cut."""
    body = b'{"messages":[{"role":"user","content":"' + b"x" * 10_000_000 + b'"}]}'
    response = raw_post(server, [body], f"content-length: {len(body)}")
    assert response.startswith(b"HTTP/1.1 413")
    assert b'"body_too_large"' in response
    chunks = [b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:5_000_000], body[5_000_000:])]
    response = raw_post(server, [*chunks, b"0\r\n\r\n"], "transfer-encoding: chunked")
    assert response.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (traffic.CHAT, ["content-type: application/json"], b"413"),
        (traffic.CHAT, ["content-type: text/plain"], b"415"),
        (traffic.CHAT, ["content-type: application/json", "x-api-key: kiln-" + "A" * 43], b"401"),
        (traffic.CHAT, ["content-type: application/json", "origin: https://evil.example"], b"403"),
        ("/v1/nothing", ["content-type: application/json"], b"404"),
        ("/v1/models", ["content-type: application/json"], b"405"),
        ("/lmkit/v1/memory/home", ["content-type: application/json"], b"413"),
    ],
)
def test_a_refusal_reaches_a_client_that_sends_all_before_it_reads(
    server: Server, path: str, headers: list[str], status: bytes
) -> None:
    """The connection is to be closed; with unread data on it that would be a reset."""
    url = urlsplit(server.url)
    body = b"x" * 10_000_000
    lines = [f"POST {path} HTTP/1.1", f"host: {url.netloc}", "connection: close", *headers]
    with connected(server.url) as connection:
        connection.sendall("\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body)
        received = b""
        while part := connection.recv(65536):
            received += part
    assert received.startswith(b"HTTP/1.1 " + status)
    assert received.endswith(b"}") and b'"code"' in received


def raw_post(server: Server, parts: list[bytes], *headers: str) -> bytes:
    """What comes back for a request, even if the server does not wait for all of it."""
    host = urlsplit(server.url).netloc
    lines = [f"POST {traffic.CHAT} HTTP/1.1", f"host: {host}", "content-type: application/json"]
    received = b""
    with connected(server.url) as connection:
        connection.sendall("\r\n".join([*lines, *headers, "", ""]).encode())
        try:
            for part in parts:
                connection.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass
        while b'"}}' not in received:
            part = connection.recv(65536)
            if not part:
                break
            received += part
    return received


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "assistant", "tool_calls": [1]}],
        [{"role": "assistant", "tool_calls": [{}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": 5, "arguments": {}}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": None}}]}],
    ],
)
def test_messages_that_the_template_refuses(server: Server, messages: list[Any]) -> None:
    response = send(server, {"messages": [{"role": "user", "content": "1"}, *messages]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "chat_template_failed"
    assert error["param"] == "messages"


@pytest.mark.parametrize("depth", [50, 200, 500, 900])
@pytest.mark.parametrize("place", ["chat_template_kwargs", "tools", "tool_calls", "tool_choice", "arguments"])
def test_nested_values(server: Server, place: str, depth: int) -> None:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    user = {"role": "user", "content": "1"}
    called = {"type": "function", "function": {"name": "f", "arguments": {"a": value}}}
    written = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"a": value})}}
    bodies: dict[str, dict[str, Any]] = {
        "chat_template_kwargs": {"chat_template_kwargs": {"a": value}},
        "tools": {"tools": [value]},
        "tool_choice": {"tool_choice": value},
        "tool_calls": {"messages": [user, {"role": "assistant", "tool_calls": [called]}]},
        "arguments": {"messages": [user, {"role": "assistant", "tool_calls": [written]}]},
    }
    response = send(server, bodies[place])
    assert response.status_code in (200, 400)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 2**63},
        {"max_tokens": BIG - 1, "stream": True},
        {"max_completion_tokens": BIG - 1},
        {"thinking_budget_tokens": 2**63},
        {"thinking_budget_tokens": BIG - 1},
        {"thinking_budget_ms": 2**63},
        {"thinking_budget_ms": BIG - 1},
    ],
)
def test_great_numbers(server: Server, fields: dict[str, Any]) -> None:
    response = send(server, {"stop": "nswer", **fields})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("name", ["thinking_budget_tokens", "thinking_budget_ms", "max_tokens"])
@pytest.mark.parametrize("power", [20, 30, 310, 400])
@pytest.mark.parametrize("stream", [False, True])
def test_numbers_beyond_everything(server: Server, name: str, power: int, stream: bool) -> None:
    """Taken or refused, but with the field named, and without a trace left in the engine."""
    response = send(server, {name: 10**power, "stream": stream})
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["param"] == name
    server.wait_idle()


@pytest.mark.parametrize("name", [*NATURALS, *NUMBERS])
@pytest.mark.parametrize("digits", [4000, 5000])
def test_numbers_too_long_to_print(server: Server, name: str, digits: int) -> None:
    body = f'{{"messages":[{{"role":"user","content":"1"}}],"{name}":{"9" * digits}}}'
    response = send(server, body)
    assert response.status_code == 400, response.text[:300]
    error = response.json()["error"]
    assert error["param"] == name or error["code"] == "invalid_json"
    assert len(error["message"]) < 1000


def test_odd_but_legal(server: Server) -> None:
    strange: list[dict[str, Any]] = [
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": ""}]},
        {"messages": [{"role": "user", "content": []}]},
        {"messages": [{"role": "user", "content": [7, None, "x"]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": "a\x00b\x00"}]},
        {"messages": [{"role": "\x00", "content": "a"}]},
        {"messages": [{"role": "r" * 100_000, "content": "a"}]},
        {"messages": [{"role": "", "content": "a"}]},
        {"messages": [{"role": "user", "content": "\u202e\ufeff\ufffd\uffff\U000fffff\U00100000"}]},
        {"unknown": {"x": [1]}, "logit_bias": 5, "user": 7},
        {"sampling_preset": "no such preset"},
        {"sampling_preset": "greedy", "n": 2},
        {"stop": []},
        {"stop": [f"s{i}" for i in range(256)]},
        {"stop": "\x00"},
        {"tools": []},
        {"tools": [1, None, "x", {"a": []}]},
        {"tool_choice": {"a": 1}},
        {"adapter": ""},
        {"adapter": None, "adapters": None},
        {"adapters": []},
        {"chat_template_kwargs": {"enable_thinking": {"a": 1}}},
        {"chat_template_kwargs": {"": 1, "a b": 2, "self": 3, "loop": 4, "namespace": 5, "range": 6}},
        {"stream_options": {"x": 1}},
        {"seed": BIG - 1, "temperature": 1},
        {"top_k": 2**32 - 1, "temperature": 1},
        {"n": 64, "max_tokens": 1},
        {"max_tokens": 0, "n": 64},
    ]
    for body in strange:
        response = send(server, body)
        assert response.status_code in (200, 400), (str(body)[:200], response.text)
        if response.status_code == 400:
            assert "chat_template_failed" in response.text, (str(body)[:200], response.text)


def test_a_prompt_that_fills_the_context(small_server: Server) -> None:
    used = small_server.ask("1", max_tokens=1)["usage"]["prompt_tokens"]
    fits = 128 - used + 1
    assert small_server.ask("1" * (fits - 1))["usage"]["completion_tokens"] == 1
    # No room for an answer, but none is asked for.
    assert small_server.ask("1" * fits, max_tokens=0)["usage"]["prompt_tokens"] == 128
    for digits, limit in ((fits, 5), (fits + 1, 5), (fits + 1, 0), (4000, 5)):
        error = small_server.refuse("1" * digits, max_tokens=limit)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    # The limit is clamped to what is left.
    body = small_server.ask("1" * (fits - 7), max_tokens=500, ignore_eos=True)
    assert body["usage"]["total_tokens"] == 128
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{}", 400),
        (b"[]", 400),
        (b'{"request_id": 5}', 400),
        (b'{"request_id": null}', 400),
        (b'{"request_id": ""}', 404),
        (b'{"request_id": "chatcmpl-nope"}', 404),
        (b"\xff", 400),
    ],
)
def test_the_native_route(server: Server, body: bytes, status: int) -> None:
    response = server.client.post("/lmkit/v1/chat/skip-thinking", content=body, headers=JSON)
    assert response.status_code == status
    assert set(response.json()) == {"error", "code"}


def test_a_request_that_is_no_http(server: Server) -> None:
    for garbage in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"POST / HTTP/9\r\n\r\n"):
        with connected(server.url) as connection:
            connection.sendall(garbage + b"\r\n\r\n")
            received = connection.recv(65536)
            assert not received.startswith(b"HTTP/1.1 5")
