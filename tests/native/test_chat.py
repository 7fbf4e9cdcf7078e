"""The native chat on the bundled model: answers, events, and every field that steers generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from servers.server import serving_model

from .api import ADD, CHAT, Native

BUNDLED = Path(__file__).parents[2] / "models" / "tiny-reasoner" / "chat_template.jinja"
THOUGHT = "3+8=11\n11-2=9\n9+7=16"
ANSWER = "The answer is 16."


def test_a_whole_answer(native: Native) -> None:
    answer = native.ask()
    assert set(answer) == {"result", "thinking"}
    assert answer["thinking"] == THOUGHT
    result = answer["result"]
    assert result["text"] == ANSWER
    assert (result["model"], result["reason"], result["rounds"]) == ("tiny-reasoner", "stop", 1)
    assert result["prompt_tokens"] == 18
    assert result["ctx"] == result["prompt_tokens"] + result["tokens"]
    assert result["ctx_max"] == 4096
    assert 0 < result["thinking_tokens"] < result["tokens"]
    assert result["gen_secs"] > 0 and result["prompt_secs"] > 0
    assert result["rate"] == pytest.approx((result["tokens"] - 1) / result["gen_secs"], rel=0.01)
    assert result["thinking_budget"]["applied"] is False


def test_the_events_of_a_stream(native: Native) -> None:
    stream = native.stream()
    assert stream.names == ["status", "delta thinking", "delta text", "done"]
    assert [s["phase"] for s in stream.all("status")][:2] == ["session", "prompt"]
    assert stream.all("status")[-1] == {"phase": "prompt", "pct": 100.0, "done": 18, "total": 18}
    assert stream.text("thinking") == THOUGHT
    assert stream.text("text") == stream.done["text"] == ANSWER
    assert "choices" not in stream.done


def test_a_long_prompt_is_narrated_as_it_is_read(native: Native) -> None:
    statuses = native.stream("1+" * 900 + "1=?", max_tokens=1).all("status")
    read = [s["done"] for s in statuses if s["phase"] == "prompt"]
    assert len(read) > 1
    assert read == sorted(read)
    assert read[-1] == statuses[-1]["total"]


class TestAlternatives:
    def test_they_stream_with_their_index_and_are_listed(self, native: Native) -> None:
        stream = native.stream(n=3, seed=5, temperature=1.5)
        choices = stream.done["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        for choice in choices:
            assert stream.text("text", choice["index"]) == choice["text"]
            assert stream.text("thinking", choice["index"]) == choice.get("thinking", "")
        assert stream.done["text"] == choices[0]["text"]
        assert stream.done["tokens"] == sum(choice["tokens"] for choice in choices)
        # One reading of the prompt.
        assert stream.done["prompt_tokens"] == 18

    def test_alternative_i_samples_from_seed_plus_i(self, native: Native) -> None:
        several = native.ask(n=3, seed=40, temperature=2, reasoning="none")["result"]["choices"]
        alone = [native.ask(seed=40 + i, temperature=2, reasoning="none")["result"]["text"] for i in range(3)]
        assert [choice["text"] for choice in several] == alone
        assert len(set(alone)) > 1

    def test_the_largest_seed_goes_on(self, native: Native) -> None:
        assert len(native.ask(n=8, seed=2**32 - 1, max_tokens=2)["result"]["choices"]) == 8

    @pytest.mark.parametrize("field", [{"tools": [ADD]}])
    def test_tools_exclude_them(self, native: Native, field: dict[str, Any]) -> None:
        error = native.refuse(n=2, **field)
        assert "`n`" in error["error"] and next(iter(field)) in error["error"]


class TestReasoning:
    def test_none_does_not_think(self, native: Native) -> None:
        answer = native.ask(reasoning="none")
        assert "thinking" not in answer
        assert answer["result"]["thinking_tokens"] == 0
        assert answer["result"]["text"].startswith("The answer is")

    def test_none_closes_what_the_template_opens(self, tmp_path: Path) -> None:
        always = BUNDLED.read_text("utf-8").replace("enable_thinking is false", "false")
        path = tmp_path / "always.jinja"
        path.write_text(always, "utf-8")
        with serving_model(model__chat_template_file=str(path)) as server:
            answer = Native(server).ask(reasoning="none")
        assert "thinking" not in answer
        assert answer["result"]["thinking_budget"]["trigger"] == "tokens"
        assert answer["result"]["text"].startswith("The answer is")

    @pytest.mark.parametrize(("effort", "limit"), [("low", 512), ("medium", 2048), ("high", None)])
    def test_efforts_are_budgets(self, native: Native, effort: str, limit: int | None) -> None:
        record = native.ask(reasoning=effort)["result"]["thinking_budget"]
        assert record["applied"] is (limit is not None)
        assert record.get("max_tokens") == limit
        assert record["tokens_source"] == ("request_unlimited" if limit is None else "request")

    def test_a_stated_budget_wins(self, native: Native) -> None:
        record = native.ask(reasoning="low", thinking_budget_tokens=4)["result"]["thinking_budget"]
        assert (record["max_tokens"], record["trigger"], record["thinking_tokens"]) == (4, "tokens", 4)

    def test_time_is_a_budget_too(self, native: Native) -> None:
        record = native.ask("Think forever.", thinking_budget_ms=0, max_tokens=40)["result"][
            "thinking_budget"
        ]
        assert (record["applied"], record["trigger"], record["closed"]) == (True, "time", True)


def test_logprobs_of_all_channels(native: Native) -> None:
    answer = native.ask(top_logprobs=2, logprobs=False)
    tokens = answer["result"]["logprobs"]
    assert len(tokens) == answer["result"]["tokens"]
    text = b"".join(bytes(token["bytes"]) for token in tokens).decode()
    assert text.startswith(THOUGHT)
    assert "</think>" in text and ANSWER in text
    for token in tokens:
        assert token["logprob"] <= 0
        assert len(token["top_logprobs"]) == 2
        assert token["top_logprobs"][0]["id"] == token["id"]  # greedy
    assert native.ask(logprobs=True)["result"]["logprobs"][0]["top_logprobs"] == []
    assert "logprobs" not in native.ask(top_logprobs=0)["result"]


def test_logprobs_of_alternatives_are_their_own(native: Native) -> None:
    result = native.ask(n=2, logprobs=True, max_tokens=5, seed=1, temperature=2)["result"]
    assert "logprobs" not in result
    assert [len(choice["logprobs"]) for choice in result["choices"]] == [5, 5]


def test_stop_and_length(native: Native) -> None:
    assert native.ask(stop=[" is"])["result"]["text"] == "The answer"
    assert native.ask(max_tokens=5)["result"]["reason"] == "length"
    assert native.ask(max_tokens=0)["result"]["tokens"] == 0


def test_penalties_and_cutoffs_reach_the_sampler(native: Native) -> None:
    plain = native.ask(reasoning="none", max_tokens=12)["result"]["text"]
    assert native.ask(reasoning="none", max_tokens=12, repeat_penalty=50)["result"]["text"] != plain
    assert native.ask(reasoning="none", max_tokens=12, presence_penalty=2)["result"]["text"] == plain
    hot: dict[str, Any] = {"temperature": 100, "seed": 3, "reasoning": "none", "max_tokens": 12}
    assert native.ask(**hot, min_p=0, top_p=1, top_k=0)["result"]["text"] != plain
    for cut in ({"min_p": 1}, {"top_p": 0}, {"top_k": 1}):
        assert native.ask(**hot, **cut)["result"]["text"] == plain


def test_null_is_absent(native: Native) -> None:
    absent = native.ask()["result"]
    fields = (
        "model system top_p top_k min_p seed max_tokens n logprobs top_logprobs logit_bias stop"
        " frequency_penalty presence_penalty repeat_penalty reasoning response_format tools server_tools"
        " tool_choice stream request_id skill skills skill_inputs memory memory_store agent"
    )
    assert native.ask(**dict.fromkeys(fields.split()))["result"]["text"] == absent["text"]
    assert native.ask(model="  ")["result"]["model"] == "tiny-reasoner"


def test_the_system_prompt_joins_the_system_turn(native: Native) -> None:
    def prompt_tokens(**body: Any) -> int:
        tokens = native.server.client.post(CHAT, json=body).json()["result"]["prompt_tokens"]
        assert isinstance(tokens, int)
        return tokens

    user = {"role": "user", "content": "1+1=?"}
    together = [{"role": "system", "content": "Add.\n\nBe brief."}, user]
    apart = [{"role": "system", "content": "Be brief."}, user]
    assert prompt_tokens(messages=together) == prompt_tokens(messages=apart, system="Add.")
    alone = [{"role": "system", "content": "Add."}, user]
    assert prompt_tokens(messages=alone) == prompt_tokens(messages=[user], system="Add.")


class TestClientTools:
    ASK = "What is 3+4?"

    def test_a_call_ends_the_exchange(self, native: Native) -> None:
        stream = native.stream(self.ASK, tools=[ADD])
        assert stream.names == ["status", "delta thinking", "delta tool", "tool_call", "done"]
        (call,) = stream.all("tool_call")
        assert call["name"] == "add"
        assert json.loads(call["arguments"]) == {"a": 3, "b": 4}
        assert stream.done["reason"] == "tool_calls"
        assert stream.done["tool_calls"] == [call]
        assert json.loads(stream.text("tool")) == {"name": "add", "arguments": {"a": 3, "b": 4}}

    def test_its_result_continues_it(self, native: Native) -> None:
        first = native.ask(self.ASK, tools=[ADD])["result"]
        (call,) = first["tool_calls"]
        messages = [
            {"role": "user", "content": self.ASK},
            *first["messages"],
            {"role": "tool", "tool_call_id": call["id"], "content": "7"},
        ]
        second = native.ask(tools=[ADD], messages=messages)["result"]
        assert second["reason"] == "stop"
        assert "7" in second["text"]
        # An object is as good as its text.
        messages[1]["tool_calls"][0]["arguments"] = {"a": 3, "b": 4}
        assert native.ask(tools=[ADD], messages=messages)["result"]["text"] == second["text"]

    def test_none_calls_none(self, native: Native) -> None:
        result = native.ask(self.ASK, tools=[ADD], tool_choice="none")["result"]
        assert "tool_calls" not in result
        assert result["reason"] != "tool_calls"


def test_a_model_that_is_not_served(native: Native) -> None:
    for stream in (False, True):
        error = native.refuse(status=404, model="nobody", stream=stream)
        assert error["code"] == "model_not_found"
        assert "nobody" in error["error"]


def test_v1_hears_nothing_of_raw_tool_traffic(native: Native) -> None:
    function = {"type": "function", "function": ADD}
    streamed = native.server.stream("What is 3+4?", tools=[function])
    assert streamed.finish_reason == "tool_calls"
    assert "add" not in streamed.content


class TestShapes:
    SCHEMA = {
        "type": "object",
        "properties": {"answer": {"type": "integer"}, "unit": {"enum": ["apples"]}},
        "required": ["answer", "unit"],
        "additionalProperties": False,
    }

    def test_a_schema_is_kept_to(self, native: Native) -> None:
        shape = {"type": "json_schema", "json_schema": {"schema": self.SCHEMA}}
        stream = native.stream(response_format=shape)
        assert stream.text("thinking") == THOUGHT
        answer = json.loads(stream.done["text"])
        assert set(answer) == {"answer", "unit"}
        assert answer["unit"] == "apples"

    @pytest.mark.parametrize("temperature", [0, 3])
    def test_any_object(self, native: Native, temperature: int) -> None:
        result = native.ask(
            response_format={"type": "json_object"}, temperature=temperature, seed=1, max_tokens=150
        )["result"]
        if result["reason"] == "stop":
            assert isinstance(json.loads(result["text"]), dict)
        else:
            assert result["text"].startswith("{")

    def test_text_is_free(self, native: Native) -> None:
        assert native.ask(response_format={"type": "text"})["result"]["text"] == ANSWER

    def test_a_schema_that_cannot_be_enforced(self, native: Native) -> None:
        schema = {"type": "array", "uniqueItems": True}
        shape = {"type": "json_schema", "json_schema": {"schema": schema}}
        assert (
            "response_format.json_schema.schema.uniqueItems" in native.refuse(response_format=shape)["error"]
        )

    def test_of_alternatives_too(self, native: Native) -> None:
        shape = {"type": "json_schema", "json_schema": {"schema": self.SCHEMA}}
        result = native.ask(response_format=shape, n=2, seed=1, temperature=1)["result"]
        assert all(json.loads(choice["text"])["unit"] == "apples" for choice in result["choices"])


class TestToolChoice:
    def test_required(self, native: Native) -> None:
        result = native.ask("Hello!", tools=[ADD], tool_choice="required")["result"]
        assert result["reason"] == "tool_calls"
        assert result["tool_calls"][0]["name"] == "add"

    def test_named(self, native: Native) -> None:
        other = {**ADD, "name": "other"}
        choice = {"name": "other"}
        result = native.ask("What is 3+4?", tools=[ADD, other], tool_choice=choice)["result"]
        assert [call["name"] for call in result["tool_calls"]] == ["other"]

    def test_of_a_server_tool_is_over_once_it_was_called(self, native: Native) -> None:
        result = native.ask("Hello!", server_tools=["add"], tool_choice="required")["result"]
        assert result["reason"] == "stop"
        assert result["rounds"] >= 2

    def test_a_schema_that_cannot_be_enforced(self, native: Native) -> None:
        bad = {"name": "bad", "parameters": {"type": "object", "not": {}}}
        error = native.refuse(tools=[ADD, bad], tool_choice="required")
        assert "tools[1].parameters.not" in error["error"]

    @pytest.mark.parametrize("choice", ["required", {"name": "add"}])
    def test_without_the_tool(self, native: Native, choice: Any) -> None:
        assert "tool_choice" in native.refuse(tool_choice=choice)["error"]


def test_a_bias_by_id_and_by_text(native: Native) -> None:
    sixteen = native.ask(reasoning="none", logprobs=True)["result"]
    first = str(sixteen["logprobs"][0]["id"])
    word = sixteen["logprobs"][0]["token"]
    for key in (first, word):
        never = native.ask(reasoning="none", logit_bias={key: -100})["result"]
        assert not never["text"].startswith(word)
    forced = native.ask(reasoning="none", logit_bias={" is": 100}, max_tokens=4)["result"]
    assert forced["text"] == " is is is is"
    assert "logit_bias" in native.refuse(logit_bias={"99999": 1})["error"]


def test_files_come_before_the_message(native: Native) -> None:
    def ask(message: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = native.ask(messages=[message], max_tokens=1)["result"]
        return result

    file = {"name": "note.txt", "text": "7 apples"}
    base64 = {"name": "note.txt", "data": "NyBhcHBsZXM="}
    plain = ask({"role": "user", "content": "How many?"})
    texts = [ask({"role": "user", "content": "How many?", "files": [f]}) for f in (file, base64)]
    assert texts[0]["prompt_tokens"] == texts[1]["prompt_tokens"] > plain["prompt_tokens"] + 10
    for wrong, field in (
        ({"name": "x"}, "messages[0].files[0]"),
        ({"name": "x", "data": "!"}, "messages[0].files[0].data"),
        ({"text": "x"}, "messages[0].files[0].name"),
    ):
        error = native.refuse(messages=[{"role": "user", "content": "", "files": [wrong]}])
        assert field in error["error"]


def test_images_are_refused_by_name(native: Native) -> None:
    messages = [{"role": "user", "content": "What is it?", "images": ["aGk="]}]
    assert "messages[0].images" in native.refuse(messages=messages)["error"]
    assert native.ask(messages=[{"role": "user", "content": "1+1=?", "images": []}])["result"]["text"]
