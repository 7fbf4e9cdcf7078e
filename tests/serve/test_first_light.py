"""The first requests anybody sends, and the routes beside the chat."""

from __future__ import annotations

import re
import time

import httpx
import pytest

from kiln import __version__
from servers.server import PROMPT, Server, metric

CURL_BODY = '{"messages":[{"role":"user","content":"3+8-2+7=?"}],"temperature":0,"thinking_budget_tokens":16}'
OUTCOMES = {
    "unconfigured",
    "inert",
    "natural_close",
    "tokens",
    "time",
    "max_tokens",
    "unclosed",
    "interrupted",
    "unresolved",
}


def test_the_first_curl(server: Server) -> None:
    headers = {"content-type": "application/json"}
    response = server.client.post("/v1/chat/completions", content=CURL_BODY, headers=headers)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    message = body["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert message["reasoning_content"].startswith("3+8=11")
    assert message["content"]
    record = body["metadata"]["thinking_budget"]
    assert record["thinking_tokens"] <= 16
    stated = {
        "configured": True,
        "applied": True,
        "max_tokens": 16,
        "tokens_source": "request",
        "time_source": "unlimited",
        "closed": True,
    }
    assert stated.items() <= record.items()
    assert "max_time_ms" not in record
    assert body["id"].startswith("chatcmpl-")
    assert abs(body["created"] - time.time()) < 60


def test_without_a_budget(server: Server) -> None:
    body = server.ask()
    assert body["metadata"]["thinking_budget"] == {
        "configured": False,
        "applied": False,
        "tokens_source": "unlimited",
        "time_source": "unlimited",
        "triggered": False,
    }
    assert "thinking_budget" not in body["choices"][0]
    assert body["choices"][0]["message"]["reasoning_content"]
    assert body["choices"][0]["message"]["content"]
    thinking = {k: v for k, v in body["metadata"].items() if "thinking" in k and k != "thinking_budget"}
    assert thinking == {
        "thinking_enabled": True,
        "thinking_mode": "reasoning",
        "thinking_source": "template_default",
        "default_thinking_enabled": True,
    }


def test_thinking_is_switched_off_by_the_request(server: Server) -> None:
    body = server.ask(chat_template_kwargs={"enable_thinking": False})
    assert "reasoning_content" not in body["choices"][0]["message"]
    assert body["choices"][0]["message"]["content"]
    assert body["metadata"]["thinking_enabled"] is False
    assert body["metadata"]["thinking_mode"] == "non_reasoning"
    assert body["metadata"]["thinking_source"] == "request"
    assert body["metadata"]["default_thinking_enabled"] is True


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_an_odd_thinking_switch_is_custom(server: Server, value: object) -> None:
    body = server.ask(chat_template_kwargs={"enable_thinking": value})
    assert body["metadata"]["thinking_source"] == "custom"
    # The bundled template only heeds a plain false, and the prompt is what counts.
    assert body["metadata"]["thinking_enabled"] is True
    assert body["choices"][0]["message"]["reasoning_content"]


def test_the_server_may_switch_thinking_off(quiet_server: Server) -> None:
    body = quiet_server.ask()
    assert "reasoning_content" not in body["choices"][0]["message"]
    assert body["metadata"]["thinking_enabled"] is False
    assert body["metadata"]["thinking_source"] == "server_default"
    assert body["metadata"]["default_thinking_enabled"] is False
    body = quiet_server.ask(chat_template_kwargs={"enable_thinking": True}, thinking_budget_tokens=4)
    assert body["choices"][0]["message"]["reasoning_content"]
    assert body["metadata"]["thinking_source"] == "request"
    assert body["metadata"]["default_thinking_enabled"] is False
    assert body["metadata"]["thinking_budget"]["applied"] is True


def test_a_stream(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "stream": True}
    response = server.client.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].split(";")[0] == "text/event-stream"
    assert response.headers["cache-control"] == "no-cache"
    assert response.content.endswith(b"data: [DONE]\n\n")
    streamed = server.stream()
    plain = server.ask()
    assert streamed.choices[0]["delta"] == {"role": "assistant"}
    assert len({chunk["id"] for chunk in streamed.chunks}) == 1
    assert streamed.content == plain["choices"][0]["message"]["content"]
    assert streamed.reasoning == plain["choices"][0]["message"]["reasoning_content"]
    assert streamed.usage == plain["usage"]
    # The usage comes last, on a chunk of its own; the record just before, with the finish reason.
    assert streamed.chunks[-1]["choices"] == []
    assert streamed.chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert streamed.chunks[-2]["metadata"]["thinking_budget"]["configured"] is False
    assert len(streamed.texts("content")) > 3
    assert len(streamed.texts("reasoning_content")) > 3


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_a_stream_has_usage_only_when_asked(server: Server, options: object) -> None:
    streamed = server.stream(stream_options=options)
    assert not any("usage" in chunk for chunk in streamed.chunks)
    assert streamed.done


def test_options_of_a_stream_do_not_matter_without_one(server: Server) -> None:
    assert server.ask(stream_options={"include_usage": True})["object"] == "chat.completion"


def test_models(server: Server) -> None:
    response = server.client.get("/v1/models")
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body["object"] == "list"
    (entry,) = body["data"]
    assert entry["id"] == "tiny-reasoner"
    assert entry["object"] == "model"
    assert isinstance(entry["created"], int)
    assert server.ask(model=entry["id"])["model"] == entry["id"]


def test_health(server: Server) -> None:
    response = server.client.get("/health")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.json() == {"status": "ok"}


def test_config_names_every_source(budgeting_server: Server) -> None:
    response = budgeting_server.client.get("/v1/config")
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    settings = body["settings"]
    assert settings["server"]["default_thinking_budget_tokens"] == {"value": 8, "source": "file"}
    assert settings["server"]["default_thinking_budget_ms"] == {"value": 60_000, "source": "file"}
    assert settings["server"]["default_thinking_enabled"] == {"value": None, "source": "default"}
    assert settings["engine"]["parallel"]["source"] == "default"
    resolved = body["resolved"]
    assert resolved["version"] == __version__
    assert resolved["model"]["id"] == "tiny-reasoner"
    assert resolved["engine"]["context_length"] == 4096
    assert resolved["thinking"]["open_tag"] == "<think>"
    assert resolved["thinking"]["close_tag"] == "</think>"
    assert len(resolved["thinking"]["close_token_ids"]) == 1
    assert resolved["thinking"]["default_budget_tokens"] == 8
    assert resolved["thinking"]["default_budget_ms"] == 60_000


def test_config_shows_the_sampling_in_force(server: Server) -> None:
    sampling = server.client.get("/v1/config").json()["resolved"]["sampling"]
    names = {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    }
    assert names | {"max_tokens", "sources"} == set(sampling)
    assert set(sampling["sources"]) >= names
    assert set(sampling["sources"].values()) <= {"default", "model", "file", "environment", "flag"}
    assert sampling["max_tokens"] == 2048


def test_config_of_a_model_with_a_long_close(multi_close_server: Server) -> None:
    thinking = multi_close_server.client.get("/v1/config").json()["resolved"]["thinking"]
    assert len(thinking["close_token_ids"]) > 1


def test_metrics_count_what_became_of_budgets(server: Server) -> None:
    response = server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert set(server.outcomes()) == OUTCOMES
    before, text_before = server.outcomes(), response.text
    server.ask(thinking_budget_tokens=3)
    server.ask(thinking_budget_tokens=3, thinking_budget_ms=0)
    server.ask(thinking_budget_tokens=None)
    server.ask(thinking_budget_tokens=3, chat_template_kwargs={"enable_thinking": False})
    server.ask(thinking_budget_tokens=1000)
    server.ask("Think forever.", thinking_budget_tokens=1000, max_tokens=12)
    server.ask("Think forever.", max_tokens=12, n=2)
    server.refuse(temperature="hot")
    after, text_after = server.outcomes(), server.client.get("/metrics").text
    grown = {name: after[name] - before[name] for name in OUTCOMES if after[name] != before[name]}
    assert grown == {
        "tokens": 1,
        "time": 1,
        "unconfigured": 3,
        "inert": 1,
        "natural_close": 1,
        "max_tokens": 1,
    }

    def increase(name: str, **labels: str) -> float:
        return metric(text_after, name, **labels) - metric(text_before, name, **labels)

    source = "kiln_thinking_budget_source_total"
    assert increase(source, dimension="tokens", source="request") == 5
    assert increase(source, dimension="tokens", source="request_unlimited") == 1
    assert increase(source, dimension="tokens", source="unlimited") == 1
    assert increase(source, dimension="time", source="request") == 1
    assert increase(source, dimension="time", source="unlimited") == 6
    assert increase("kiln_thinking_budget_effective_tokens_count") == 5
    assert increase("kiln_thinking_budget_effective_tokens_sum") == 3 + 3 + 3 + 1000 + 1000
    assert increase("kiln_thinking_budget_effective_seconds_count") == 1
    assert increase("kiln_thinking_budget_effective_seconds_sum") == 0


def test_request_numbers_never_become_labels(server: Server) -> None:
    server.ask(thinking_budget_tokens=12_345, thinking_budget_ms=54_321)
    text = server.client.get("/metrics").text
    labels = set(re.findall(r"\{([^}]*)\}", text))
    assert not any("12345" in label or "54321" in label for label in labels)


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/chat", "/v1/chat/completions/x", "/nope", "/v2/models"])
def test_an_unknown_route(server: Server, path: str) -> None:
    response = server.client.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "route_not_found"
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("PUT", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/models", "GET"),
        ("POST", "/health", "GET"),
        ("POST", "/metrics", "GET"),
        ("POST", "/v1/config", "GET"),
    ],
)
def test_a_wrong_method(server: Server, method: str, path: str, allowed: str) -> None:
    response = server.client.request(method, path)
    assert response.status_code == 405
    assert response.json()["error"]["code"] == "method_not_allowed"
    assert allowed in response.headers["allow"]


def test_the_connection_is_kept(server: Server) -> None:
    with httpx.Client(base_url=server.url) as client:
        for _ in range(3):
            assert client.get("/health").headers.get("connection", "") != "close"


def test_configuration_hashes_on_request(server: Server) -> None:
    hashes = server.ask(include_config_hashes=True)["metadata"]["config_hashes"]
    parts = ("tokenizer_config", "chat_template", "model_config", "effective_config")
    assert {f"{part}_hash" for part in parts} <= set(hashes)
    assert hashes == server.ask(include_config_hashes=True)["metadata"]["config_hashes"]
    assert "config_hashes" not in server.ask()["metadata"]
