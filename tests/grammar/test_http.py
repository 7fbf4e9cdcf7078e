"""Structured output over HTTP, with the engine in its own process: hostile schemas harm nobody else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from servers.server import PROMPT, Server, chat_body, serving_model

CHAT = "/v1/openai/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving_model() as running:
        yield running


def ask(server: Server, schema: Any, **fields: Any) -> httpx.Response:
    shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    fields = {"max_tokens": 80, "reasoning_effort": "none", **fields}
    return server.client.post(CHAT, json=chat_body(response_format=shape, **fields))


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


HOSTILE: list[Any] = [
    {"type": "string", "pattern": "^(.*a.{200}b.*|.*c.{200}d.*|.*e.{200})$"},
    {"type": "string", "pattern": "(a|b)*a(a|b){20}"},
    {"type": "string", "pattern": "((a{0,1000}){0,1000}){0,1000}"},
    {"type": "string", "pattern": "(" * 500 + ")" * 500},
    {"type": "string", "pattern": "a{99999999}"},
    {"type": "string", "minLength": 10**9, "maxLength": 10**18},
    {"type": "array", "minItems": 10**9, "items": {"type": "null"}},
    {"type": "integer", "multipleOf": 0},
    {"type": "number", "minimum": 1e308, "multipleOf": 1e-300},
    {"enum": [[[["x" * 1000]]]] * 200},
    {"properties": {f"p{i}": {"type": "string"} for i in range(900)}},
    {"anyOf": [{"properties": {f"p{i}": {"const": i}}, "required": [f"p{i}"]} for i in range(400)]},
    {"allOf": [{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(4)]} for i in range(8)]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}},
    {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"$ref": "http://127.0.0.1:1/schema.json"},
    {"$ref": "file:///etc/passwd"},
    {"properties": {'"\n\\x': {"type": "string"}, "": {"const": "%json"}}, "required": ["", '"\n\\x']},
    nested(60),
    nested(400),
]


def test_hostile_schemas_are_answered_or_refused_and_harm_nobody(server: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        hostile = [pool.submit(ask, server, schema) for schema in HOSTILE]
        plain = [pool.submit(server.client.post, CHAT, json=chat_body(PROMPT)) for _ in range(8)]
    for schema, future in zip(HOSTILE, hostile, strict=True):
        response = future.result()
        assert response.status_code in (200, 400), (str(schema)[:100], response.text)
        if response.status_code == 400:
            error = response.json()["error"]
            assert error["code"] in ("invalid_field", "grammar_failed", "invalid_json")
            assert error["message"] and error["hint"]
    assert {future.result().status_code for future in plain} == {200}
    server.wait_idle()
    assert server.client.get("/health").json()["status"] == "ok"


def test_what_no_bound_foresaw_is_given_up_and_harms_nobody(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many at once as would hold every thread that prepares requests."""
    monkeypatch.setattr("kiln.chat.structured.schemas.MAX_TOGETHER", 1000)

    def slow(names: str) -> dict[str, Any]:
        patterns = [{"type": "string", "pattern": f".*{names}{at}.*"} for at in range(30)]
        return {"properties": {"a": {"type": "integer"}, "b": {"allOf": patterns}}}

    with ThreadPoolExecutor(8) as pool:
        hostile = [pool.submit(ask, server, slow(name)) for name in "xy"]
        plain = [pool.submit(server.client.post, CHAT, json=chat_body(PROMPT)) for _ in range(4)]
    for future in hostile:
        response = future.result()
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["code"] == "invalid_field" and "takes too long to compile" in error["message"]
        assert error["param"].startswith("response_format.json_schema.schema") and error["hint"]
    assert {future.result().status_code for future in plain} == {200}
    assert ask(server, {"type": "integer", "maximum": 9}).status_code == 200


def test_names_that_look_like_syntax_are_data(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {'"\n\\x': {"const": "</think>"}, "": {"const": "%json {"}},
        "required": ["", '"\n\\x'],
    }
    choice = ask(server, schema).json()["choices"][0]
    assert json.loads(choice["message"]["content"]) == {'"\n\\x': "</think>", "": "%json {"}


def test_the_refusal_names_the_keyword(server: Server) -> None:
    response = ask(server, {"properties": {"tags": {"type": "array", "uniqueItems": True}}})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "response_format.json_schema.schema.properties.tags.uniqueItems"
    assert error["type"] == "invalid_request_error" and error["code"] == "invalid_field"


def test_sixteen_grammars_at_once(server: Server) -> None:
    """Each stream keeps to its own."""

    def number(low: int) -> int:
        schema = {"type": "integer", "minimum": low, "maximum": low + 3}
        response = ask(server, schema, temperature=1, seed=low)
        return int(response.json()["choices"][0]["message"]["content"])

    lows = range(100, 260, 10)
    with ThreadPoolExecutor(16) as pool:
        for low, answer in zip(lows, pool.map(number, lows), strict=True):
            assert low <= answer <= low + 3
