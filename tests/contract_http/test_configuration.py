"""Sampling presets and configuration hashes on a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kiln.dialects.kiln import decode_chat, to_turn

from .api import BATCH, CHAT, SCORE, Api, Body, model_api, say, texts

GENERAL: Body = {"temperature": 1, "top_p": 0.95, "top_k": 20, "min_p": 0, "presence_penalty": 1.5}
PRESETS: dict[str, Body] = {
    "qwen3-thinking-general": GENERAL,
    "qwen3-thinking-coding": {**GENERAL, "temperature": 0.6, "presence_penalty": 0},
    "qwen3-non-thinking-general": {**GENERAL, "temperature": 0.7, "top_p": 0.8},
    "qwen3-non-thinking-reasoning": {**GENERAL, "top_p": 1, "top_k": 40, "presence_penalty": 2},
    "greedy": {"temperature": 0},
}
HASHES = {"tokenizer_config_hash", "chat_template_hash", "model_config_hash", "effective_config_hash"}


def sampling_of(api: Api, **fields: object) -> Body:
    """The sampling that a rollout states, without a temperature of the test's own."""
    body = {"messages": say("1+1=?"), "max_tokens": 2, "rollout_provenance": True, **fields}
    record = api.whole(CHAT, body)["choices"][0]["rollout_provenance"]
    sampling: Body = record["sampling"]
    return sampling


def hashes_of(api: Api, **fields: object) -> Body:
    found: Body = api.chat(max_tokens=1, include_config_hashes=True, **fields)["metadata"]["config_hashes"]
    return found


class TestPresets:
    @pytest.mark.parametrize("name", PRESETS)
    def test_what_they_stand_for(self, api: Api, name: str) -> None:
        sampling = sampling_of(api, sampling_preset=name)
        assert PRESETS[name].items() <= sampling.items()
        assert sampling["repetition_penalty"] == 1
        assert sampling["frequency_penalty"] == 0

    @pytest.mark.parametrize("name", ["", "unknown", "GREEDY", "qwen3", "\N{SNOWMAN}"])
    def test_an_unknown_one_is_the_general_one(self, api: Api, name: str) -> None:
        assert sampling_of(api, sampling_preset=name) == sampling_of(
            api, sampling_preset="qwen3-thinking-general"
        )

    @pytest.mark.parametrize("fields", [{}, {"sampling_preset": None}])
    def test_none(self, api: Api, fields: Body) -> None:
        resolved = api.server.client.get("/v1/config").json()["resolved"]["sampling"]
        sampling = sampling_of(api, **fields)
        for name in ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "repetition_penalty"):
            assert sampling[name] == resolved[name]

    @pytest.mark.parametrize(
        "fields",
        [
            {"temperature": 0.25},
            {"top_p": 0.5},
            {"top_k": 7},
            {"top_k": 0},
            {"min_p": 0.125},
            {"presence_penalty": 0},
            {"frequency_penalty": 0.5},
            {"repetition_penalty": 1.25},
        ],
    )
    def test_explicit_fields_win(self, api: Api, fields: Body) -> None:
        sampling = sampling_of(api, sampling_preset="qwen3-non-thinking-reasoning", **fields)
        expected = {**PRESETS["qwen3-non-thinking-reasoning"], **fields}
        assert expected.items() <= sampling.items()

    def test_an_explicit_null_leaves_it_to_the_preset(self, api: Api) -> None:
        nothing = {"temperature": None, "top_p": None, "top_k": None, "presence_penalty": None}
        assert sampling_of(api, sampling_preset="greedy", **nothing)["temperature"] == 0

    def test_it_wins_over_the_servers_settings(self) -> None:
        with model_api(sampling__temperature=0.33, sampling__top_k=3) as tuned:
            assert sampling_of(tuned)["temperature"] == 0.33
            sampling = sampling_of(tuned, sampling_preset="qwen3-thinking-coding")
            assert (sampling["temperature"], sampling["top_k"]) == (0.6, 20)

    def test_greedy_is_greedy_in_a_batch_too(self, api: Api) -> None:
        body = {"prompts": [say("1+1=?")] * 2, "n": 2, "sampling_preset": "greedy", "max_tokens": 20}
        assert set(texts(api.whole(BATCH, body))) == set(texts(api.chat("1+1=?", max_tokens=20)))

    @pytest.mark.parametrize("value", [1, True, ["greedy"], {}])
    def test_wrong_types(self, api: Api, value: object) -> None:
        assert api.refuse_chat(sampling_preset=value)["param"] == "sampling_preset"


class TestConfigHashes:
    def test_they_are_stable(self, api: Api) -> None:
        found = hashes_of(api)
        assert set(found) >= HASHES
        assert found == hashes_of(api, n=2, thinking_budget_tokens=1, sampling_preset="greedy")
        with model_api() as again:
            assert hashes_of(again) == found

    def test_they_agree_with_provenance(self, api: Api) -> None:
        found, (_, record) = hashes_of(api), api.rollout(max_tokens=2)
        assert found["tokenizer_config_hash"] == record["tokenizer"]["config_sha256"]
        assert found["chat_template_hash"] == record["tokenizer"]["chat_template_sha256"]
        assert found["effective_config_hash"] == record["behavior_policy"]["inference_config_sha256"]

    @pytest.mark.parametrize(("mode", "exact"), [("auto", [False, True, True]), ("never", [False] * 3)])
    def test_which_requests_are_exact(self, api: Api, mode: str, exact: list[bool]) -> None:
        def is_exact(server: Api, **fields: object) -> bool:
            body = {"messages": say("1+1=?"), **fields}
            prepared = server.service.prepare(to_turn(decode_chat(json.dumps(body).encode())))
            return bool(prepared.requests[0].exact)

        cases: list[Body] = [{}, {"seed": 1}, {"rollout_provenance": True}]
        with model_api(engine__exact=mode) as server:
            assert [is_exact(server, **case) for case in cases] == exact
            config = server.server.client.get("/v1/config").json()
            assert config["resolved"]["engine"]["exact"] == mode
            same = hashes_of(server)["effective_config_hash"] == hashes_of(api)["effective_config_hash"]
            assert same is (mode == "auto")

    def test_another_template(self, api: Api, tmp_path: Path) -> None:
        file = tmp_path / "template.jinja"
        file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}\n", encoding="utf-8")
        with model_api(model__chat_template_file=str(file)) as other:
            found, here = hashes_of(other), hashes_of(api)
        assert found["chat_template_hash"] != here["chat_template_hash"]
        assert found["model_config_hash"] == here["model_config_hash"]

    def test_another_context(self, api: Api, small_api: Api) -> None:
        found, here = hashes_of(small_api), hashes_of(api)
        assert found["effective_config_hash"] != here["effective_config_hash"]
        assert {k: v for k, v in found.items() if k != "effective_config_hash"} == {
            k: v for k, v in here.items() if k != "effective_config_hash"
        }

    def test_another_tokenizer(self, api: Api, multi_close_api: Api) -> None:
        assert hashes_of(multi_close_api) != hashes_of(api)

    @pytest.mark.parametrize("wish", [None, False])
    def test_nobody_asked(self, api: Api, wish: bool | None) -> None:
        assert "config_hashes" not in api.chat(max_tokens=1, include_config_hashes=wish)["metadata"]

    def test_the_servers_default(self) -> None:
        with model_api(server__include_config_hashes=True) as telling:
            assert "config_hashes" in telling.chat(max_tokens=1)["metadata"]
            metadata = telling.chat(max_tokens=1, include_config_hashes=False)["metadata"]
            assert "config_hashes" not in metadata

    def test_a_stream_has_no_place_for_them(self, api: Api) -> None:
        events = api.stream(max_tokens=2, include_config_hashes=True)
        assert not any("config_hashes" in event.get("metadata", {}) for event in events)

    @pytest.mark.parametrize("field", ["include_config_hashes", "include_performance"])
    @pytest.mark.parametrize("value", [1, "true", []])
    def test_wrong_types(self, api: Api, field: str, value: object) -> None:
        assert api.refuse_chat(**{field: value})["param"] == field

    def test_scoring_ignores_them(self, api: Api) -> None:
        body = {"prompt": [5, 6], "prompt_logprobs": 0, "include_config_hashes": True, "adapter": "x"}
        assert api.whole(SCORE, body)
