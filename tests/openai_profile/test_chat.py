"""Chat completions: fields, usage, streams."""

from __future__ import annotations

import re
from typing import Any

import pytest

from .conftest import ADD, Profile


def test_an_answer(profile: Profile) -> None:
    body = profile.ask(thinking_budget_tokens=16)
    (choice,) = body["choices"]
    assert choice["message"]["content"] == "The answer is 10."
    assert choice["message"]["reasoning_content"].startswith("3+8=11")
    assert choice["finish_reason"] == "stop"
    report = body["usage"]["thinking_budget"]
    assert report["applied"] and report["trigger"] == "tokens" and report["thinking_tokens"] == 16
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 16
    assert "service_tier" not in body and "logprobs" not in choice


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_completion_tokens": 12},
        {"reasoning_effort": "low"},
        {"reasoning_effort": "none"},
        {"n": 3, "temperature": 1.3, "seed": 3},
        {"logprobs": True, "top_logprobs": 2, "seed": 1},
        {"stop": "answer"},
        {"tools": [ADD]},
        {"service_tier": "priority"},
    ],
)
def test_a_stream_says_what_the_answer_says(profile: Profile, fields: dict[str, Any]) -> None:
    profile.ask(**fields)  # warms the prefix cache, so that both find the same
    whole, streamed = profile.ask(**fields), profile.stream(**fields)
    assert streamed.done
    assert streamed.usage == whole["usage"]
    for choice in whole["choices"]:
        mine = [c for c in streamed.choices if c["index"] == choice["index"]]
        for key in ("content", "reasoning_content"):
            text = "".join(c["delta"].get(key, "") for c in mine)
            assert text == choice["message"].get(key, "")
        scored = [entry for c in mine for entry in c.get("logprobs", {}).get("content", [])]
        assert scored == choice.get("logprobs", {}).get("content", [])
        (reason,) = [c["finish_reason"] for c in mine if "finish_reason" in c]
        assert reason == choice["finish_reason"] and "finish_reason" in mine[-1]


def test_choices_are_interleaved(profile: Profile) -> None:
    streamed = profile.stream(n=3, temperature=1.3, seed=3)
    order = [c["index"] for c in streamed.choices if "reasoning_content" in c["delta"]]
    assert set(order) == {0, 1, 2} and order != sorted(order)


def test_nothing_is_sent_unasked(profile: Profile) -> None:
    plain = profile.stream(stream_options=None)
    assert all("usage" not in chunk and chunk["choices"] for chunk in plain.chunks)
    keys = {key for chunk in plain.chunks for key in chunk}
    assert keys == {"id", "object", "created", "model", "choices"}


def test_the_prefix_cache_is_in_the_usage(profile: Profile) -> None:
    prompt = "Repeat: the quick brown fox."
    first = profile.ask(prompt)["usage"]
    again = profile.ask(prompt)["usage"]
    cold, warm = first["prompt_tokens_details"], again["prompt_tokens_details"]
    assert cold["cached_tokens"] + cold["cache_write_tokens"] == first["prompt_tokens"]
    # The last token of a prompt is always computed: its logits are wanted.
    assert warm == {"cached_tokens": again["prompt_tokens"] - 1, "cache_write_tokens": 1}
    spent = (again["prompt_tokens"] - 1) * 0.25 + 1 + again["completion_tokens"] * 4
    assert again["estimated_cost"] == pytest.approx(spent / 1e6)
    assert again["estimated_cost"] < first["estimated_cost"]


def test_one_prompt_for_several_choices(profile: Profile) -> None:
    usage = profile.ask("Repeat: all of us.", n=3, seed=1, temperature=1)["usage"]
    details = usage["prompt_tokens_details"]
    assert details["cached_tokens"] + details["cache_write_tokens"] == usage["prompt_tokens"]
    assert details["cache_write_tokens"] >= 1


def test_log_probabilities_are_of_every_token_in_order(profile: Profile) -> None:
    body = profile.ask(logprobs=True, top_logprobs=3, thinking_budget_tokens=8)
    (choice,) = body["choices"]
    tokens = choice["logprobs"]["content"]
    assert len(tokens) == body["usage"]["completion_tokens"]
    text = b"".join(bytes(token["bytes"]) for token in tokens).decode()
    message = choice["message"]
    assert text.startswith(message["reasoning_content"]) and "</think>" in text
    assert message["content"] in text
    for token in tokens:
        assert token["token"] == bytes(token["bytes"]).decode("utf-8", "replace")
        best = [other["logprob"] for other in token["top_logprobs"]]
        assert len(best) == 3 and best == sorted(best, reverse=True)
        assert token["logprob"] <= best[0]


def test_log_probabilities_do_not_change_the_text(profile: Profile) -> None:
    plain = profile.ask(seed=9, temperature=1)["choices"][0]["message"]
    assert profile.ask(seed=9, temperature=1, logprobs=True)["choices"][0]["message"] == plain
    zero = profile.ask(logprobs=True, top_logprobs=0)["choices"][0]["logprobs"]["content"]
    assert all(token["top_logprobs"] == [] for token in zero)


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({"reasoning_effort": "minimal"}, 8),
        ({"reasoning_effort": "low"}, 8),
        ({"reasoning": {"effort": "medium"}}, 24),
        ({"reasoning": {"max_tokens": 6}}, 6),
        ({"reasoning_effort": "low", "thinking_budget_tokens": 5}, 5),
    ],
)
def test_efforts_are_budgets(profile: Profile, fields: dict[str, Any], budget: int) -> None:
    report = profile.ask("1+2+3+4+5+6-7+8-9=?", **fields)["usage"]["thinking_budget"]
    assert report["max_tokens"] == budget and report["tokens_source"] == "request"
    assert report["thinking_tokens"] == budget and report["trigger"] == "tokens"


def test_a_high_effort_is_unlimited_here(profile: Profile) -> None:
    assert "thinking_budget" not in profile.ask(reasoning_effort="high")["usage"]


@pytest.mark.parametrize("fields", [{"reasoning_effort": "none"}, {"reasoning": {"enabled": False}}])
def test_no_effort_is_no_thinking(profile: Profile, fields: dict[str, Any]) -> None:
    body = profile.ask(**fields)
    assert "reasoning_content" not in body["choices"][0]["message"]
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_excluded_reasoning_is_thought_and_counted(profile: Profile) -> None:
    body = profile.ask(reasoning={"exclude": True})
    assert body["choices"][0]["message"].keys() == {"role", "content"}
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 10
    streamed = profile.stream(reasoning={"exclude": True})
    assert streamed.reasoning == "" and streamed.content == body["choices"][0]["message"]["content"]


def test_a_time_budget(profile: Profile) -> None:
    report = profile.ask(thinking_budget_ms=0)["usage"]["thinking_budget"]
    assert report["trigger"] == "time" and report["max_time_ms"] == 0


def test_the_tier_is_echoed(profile: Profile) -> None:
    assert profile.ask(service_tier="priority")["service_tier"] == "priority"
    assert profile.ask(service_tier="default")["service_tier"] == "default"
    assert {chunk["service_tier"] for chunk in profile.stream(service_tier="priority").chunks} == {"priority"}


def test_parts_roles_and_unknown_fields(profile: Profile) -> None:
    plain = profile.ask()["choices"][0]["message"]
    parts = [{"type": "text", "text": "3+8-2"}, {"type": "text", "text": "+7=?"}]
    asked = profile.ask(
        messages=[{"role": "user", "content": parts}],
        user="someone",
        metadata={"a": "b"},
        store=False,
        shoe_size=44,
        modalities=["text"],
    )
    assert asked["choices"][0]["message"] == plain
    roles = [{"role": role, "content": "Be brief."} for role in ("developer", "system")]
    tokens = {
        profile.ask(messages=[role, {"role": "user", "content": "3+8=?"}])["usage"]["prompt_tokens"]
        for role in roles
    }
    assert len(tokens) == 1


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("temperature", {"temperature": 2.1}),
        ("temperature", {"temperature": -0.1}),
        ("top_p", {"top_p": 1.5}),
        ("min_p", {"min_p": -1}),
        ("presence_penalty", {"presence_penalty": 2.5}),
        ("frequency_penalty", {"frequency_penalty": -2.5}),
        ("repetition_penalty", {"repetition_penalty": 0}),
        ("n", {"n": 0}),
        ("n", {"n": 65}),
        ("seed", {"seed": -1}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("logit_bias", {"logit_bias": {"hello": 1}}),
        ("service_tier", {"service_tier": "flex"}),
        ("store", {"store": True}),
        ("functions", {"functions": [{"name": "f"}]}),
        ("function_call", {"function_call": "auto"}),
        ("audio", {"audio": {"voice": "x"}}),
        ("modalities", {"modalities": ["text", "audio"]}),
        ("prediction", {"prediction": {"type": "content", "content": "x"}}),
        ("web_search_options", {"web_search_options": {}}),
        ("verbosity", {"verbosity": "low"}),
        ("response_format.type", {"response_format": {"type": "xml"}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        (
            "response_format.json_schema.schema",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        ),
        ("reasoning_effort", {"reasoning_effort": "heroic"}),
        ("reasoning.effort", {"reasoning_effort": "low", "reasoning": {"effort": "high"}}),
        ("reasoning.max_tokens", {"reasoning": {"effort": "low", "max_tokens": 5}}),
        ("reasoning.enabled", {"reasoning_effort": "low", "reasoning": {"enabled": False}}),
        ("thinking_budget_tokens", {"reasoning": {"max_tokens": 5}, "thinking_budget_tokens": 5}),
        ("logprobs", {"logprobs": True, "reasoning": {"exclude": True}}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice.function.name", {
            "tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}
        }),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("tools[0].function", {"tools": [{"type": "function"}]}),
        ("tools[1].function.name", {"tools": [ADD, ADD]}),
        ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
        ("tools[0].function.parameters", {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "thing"}}}]
        }),
        ("tools[0].function.parameters", {"tools": [{"type": "function", "function": {
            "name": "f", "parameters": {"properties": {"a": {"$ref": "http://127.0.0.1:9/schema"}}}
        }}]}),
        ("adapters", {"adapter": "a", "adapters": [{"name": "a", "scale": 1}]}),
        ("messages", {"messages": []}),
        ("messages[0].role", {"messages": [{"role": "robot", "content": "x"}]}),
        ("messages[0].content[0].type", {"messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
        ]}),
        ("messages[0].tool_call_id", {"messages": [{"role": "tool", "content": "x"}]}),
        ("messages[0].function_call", {"messages": [
            {"role": "assistant", "content": "x", "function_call": {"name": "f", "arguments": "{}"}}
        ]}),
        ("metadata", {"metadata": {"k": "v" * 513}}),
        ("stop", {"stop": [""]}),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(
    profile: Profile, param: str, fields: dict[str, Any]
) -> None:
    error = profile.refuse(**fields)
    assert error["param"] == param
    assert error["hint"] and error["type"] == "invalid_request_error"


def test_an_unknown_model_and_the_list_of_models(profile: Profile) -> None:
    response = profile.chat(model="gpt-5")
    assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"
    listed = profile.server.client.get("/v1/openai/models").json()
    (model,) = listed["data"]
    assert profile.server.client.get(f"/v1/openai/models/{model['id']}").json() == model


@pytest.mark.parametrize(
    ("param", "fields", "words"),
    [
        ("reasoning_effort", {"reasoning_effort": "xhigh"}, {"none", "minimal", "low", "medium", "high"}),
        ("reasoning.effort", {"reasoning": {"effort": "max"}}, {"none", "minimal", "low", "medium", "high"}),
        ("tool_choice", {"tool_choice": "any"}, {"auto", "none", "required"}),
        ("tool_choice.type", {"tool_choice": {"type": "custom"}}, {"function"}),
        ("response_format.type", {"response_format": {"type": "x"}}, {"text", "json_object", "json_schema"}),
    ],
)
def test_a_wrong_word_is_answered_with_the_right_ones(
    profile: Profile, param: str, fields: dict[str, Any], words: set[str]
) -> None:
    response = profile.post("chat/completions", messages=[{"role": "user", "content": "hi"}], **fields)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param
    said = re.fullmatch(r"`.*` must be one of (.*), not '\w+'", error["message"])
    assert said is not None and set(said[1].split(", ")) == words


def test_a_contradiction_names_the_field_that_was_sent(profile: Profile) -> None:
    for fields, param in (
        ({"reasoning": {"enabled": True, "effort": "none"}}, "reasoning.effort"),
        ({"reasoning": {"enabled": True}, "reasoning_effort": "none"}, "reasoning_effort"),
    ):
        response = profile.post("chat/completions", messages=[{"role": "user", "content": "hi"}], **fields)
        assert response.status_code == 400 and response.json()["error"]["param"] == param
