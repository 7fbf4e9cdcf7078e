"""Rollout provenance on a real server: what was drawn, what was forced, and by which policy."""

from __future__ import annotations

import hashlib
import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kiln.backends.identity import sha256_of
from servers.scripted import Stage, staging
from servers.server import FIXTURES, wait_until

from .api import CHAT, PROMPT, UNTRUNCATED, Api, Body, model_api, observed
from .reference import Reference
from .test_batch import Load

LONG = "1+2-3+4-5+6-7+8-9+1-2+3-4+5=?"
PROMPTS = (PROMPT, "1+1=?", "9-5+2=?", "Hello!", LONG)
LOUD: Body = {**UNTRUNCATED, "temperature": 1.5}
SKIP = "/lmkit/v1/chat/skip-thinking"


@pytest.fixture
def multi_close() -> Path:
    path = FIXTURES / "multi-close.gguf"
    return path


def forced(record: Body) -> list[Body]:
    return [action for action in record["action_tokens"] if action["source"] == "forced"]


def ids_of(record: Body) -> list[int]:
    return [action["token_id"] for action in record["action_tokens"]]


def logprobs(record: Body) -> list[float | None]:
    return [action["behavior_logprob"] for action in record["action_tokens"]]


def drawn(record: Body) -> tuple[list[int], list[float | None]]:
    return ids_of(record), logprobs(record)


def decode(api: Api, ids: list[int]) -> str:
    return b"".join(api.pieces[i] for i in ids).decode()


class TestTheRecord:
    @pytest.mark.parametrize("content", PROMPTS)
    @pytest.mark.parametrize("budget", [None, 0, 5])
    def test_ids_and_text(self, api: Api, content: str, budget: int | None) -> None:
        # From the likeliest tokens and seeded: a free draw may be half a character, which is no text.
        fields: Body = {"max_tokens": 40, "thinking_budget_tokens": budget, "temperature": 1, "top_k": 4}
        choice, record = api.rollout(content, seed=5, **fields)
        prompt, ids = record["prompt_token_count"], ids_of(record)
        assert record["input_token_ids"][prompt:] == ids
        sequence = [action["sequence_index"] for action in record["action_tokens"]]
        assert sequence == list(range(prompt, prompt + len(ids)))
        assert decode(api, record["input_token_ids"][:prompt]).endswith("<think>\n")
        text = decode(api, ids).removesuffix("<|im_end|>")
        message = choice["message"]
        thinking, closed, content = text.partition("</think>")
        assert message.get("reasoning_content", "").strip() == thinking.strip()
        assert message["content"].strip() == content.replace("</think>", "", 1).strip() or closed == ""

    def test_the_prompt_is_what_the_template_renders(self, api: Api) -> None:
        _, record = api.rollout("1+1=?", max_tokens=2)
        prompt = decode(api, record["input_token_ids"][: record["prompt_token_count"]])
        assert prompt == "<|im_start|>user\n1+1=?<|im_end|>\n<|im_start|>assistant\n<think>\n"

    def test_all_of_a_completion_to_its_limit(self, api: Api) -> None:
        choice, record = api.rollout("Think forever.", max_tokens=17)
        assert choice["finish_reason"] == "length"
        assert len(record["action_tokens"]) == 17

    def test_a_stop_string_ends_the_record_too(self, api: Api) -> None:
        choice, record = api.rollout("1+1=?", max_tokens=40, stop=[" answer"])
        assert choice["finish_reason"] == "stop"
        assert decode(api, ids_of(record)).endswith(" answer")
        assert record["sampling"]["stop"] == [" answer"]

    def test_the_end_of_turn_is_an_action(self, api: Api) -> None:
        choice, record = api.rollout("1+1=?", max_tokens=40)
        assert choice["finish_reason"] == "stop"
        assert decode(api, ids_of(record)[-1:]) == "<|im_end|>"
        assert "<|im_end|>" not in choice["message"]["content"]

    def test_the_seed(self, api: Api) -> None:
        assert api.rollout(max_tokens=2, seed=2**64 - 1)[1]["seed"] == 2**64 - 1
        assert api.rollout(max_tokens=2, seed=0)[1]["seed"] == 0
        # A seed that the server chose repeats the rollout.
        first = api.rollout(max_tokens=24, **LOUD)[1]
        again = api.rollout(max_tokens=24, seed=first["seed"], **LOUD)[1]
        assert drawn(first) == drawn(again)
        assert api.rollout(max_tokens=2)[1]["seed"] != api.rollout(max_tokens=2)[1]["seed"]

    def test_clamped_sampling_is_what_is_stated(self, api: Api) -> None:
        wild: Body = {
            "temperature": -3,
            "top_p": 7,
            "min_p": -1,
            "presence_penalty": 9,
            "frequency_penalty": -9,
            "repetition_penalty": -1,
        }
        sampling = api.rollout(max_tokens=3, **wild)[1]["sampling"]
        assert sampling == {
            "temperature": 0,
            "top_p": 1,
            "top_k": 20,
            "min_p": 0,
            "max_tokens": 3,
            "repetition_penalty": 1,
            "presence_penalty": 2,
            "frequency_penalty": -2,
            "stop": [],
        }

    def test_the_context_clamps_the_limit(self, small_api: Api) -> None:
        _, record = small_api.rollout("Think forever.", max_tokens=4000)
        assert record["sampling"]["max_tokens"] == 128 - record["prompt_token_count"]
        assert len(record["input_token_ids"]) <= 128

    def test_max_completion_tokens(self, api: Api) -> None:
        assert api.rollout(max_completion_tokens=5)[1]["sampling"]["max_tokens"] == 5
        assert api.rollout(max_completion_tokens=5, max_tokens=4)[1]["sampling"]["max_tokens"] == 4

    def test_templates_arguments(self, api: Api) -> None:
        assert "template_invocation" not in api.rollout(max_tokens=2)[1]
        kwargs = {"enable_thinking": False, "other": [1, {"a": None}]}
        record = api.rollout(max_tokens=2, chat_template_kwargs=kwargs)[1]
        assert record["template_invocation"] == {"template_kwargs": kwargs}
        assert "template_invocation" not in api.rollout(max_tokens=2, chat_template_kwargs={})[1]

    def test_the_servers_own_argument_is_stated(self) -> None:
        with model_api(server__default_thinking_enabled=False) as quiet:
            record = quiet.rollout(max_tokens=2)[1]
            assert record["template_invocation"] == {"template_kwargs": {"enable_thinking": False}}
            # The stated arguments render the same prompt elsewhere, and here.
            stated = record["template_invocation"]["template_kwargs"]
            again = quiet.rollout(max_tokens=2, chat_template_kwargs=stated)[1]
            assert again["input_token_ids"] == record["input_token_ids"]


class TestForcedTokens:
    @pytest.mark.parametrize("budget", [0, 1, 3, 7])
    def test_a_token_budget(self, api: Api, budget: int) -> None:
        choice, record = api.rollout(LONG, max_tokens=60, thinking_budget_tokens=budget, **UNTRUNCATED)
        (close,) = forced(record)
        assert close["token_id"] == api.pieces.index(b"</think>")
        assert close["sequence_index"] == record["prompt_token_count"] + budget
        assert close["behavior_logprob"] is None
        assert record["sampling"]["thinking_budget"] == {
            "max_tokens": budget,
            "close_token_ids": [close["token_id"]],
        }
        assert choice["thinking_budget"]["trigger"] == "tokens"

    def test_a_time_budget(self, api: Api) -> None:
        choice, record = api.rollout(LONG, max_tokens=20, thinking_budget_ms=0)
        assert choice["thinking_budget"]["trigger"] == "time"
        assert [action["sequence_index"] for action in forced(record)] == [record["prompt_token_count"]]
        assert record["sampling"]["thinking_budget"]["max_time_ms"] == 0

    def test_the_reservation(self, api: Api) -> None:
        choice, record = api.rollout(LONG, max_tokens=6, thinking_budget_tokens=1000)
        assert choice["thinking_budget"]["trigger"] == "max_tokens"
        assert [action["source"] for action in record["action_tokens"]] == ["sampled"] * 5 + ["forced"]

    def test_a_natural_close_stays_sampled(self, api: Api) -> None:
        choice, record = api.rollout("1+1=?", max_tokens=40, thinking_budget_tokens=30)
        assert choice["thinking_budget"]["triggered"] is False
        assert choice["thinking_budget"]["closed"] is True
        assert forced(record) == []
        assert api.pieces.index(b"</think>") in ids_of(record)

    def test_a_natural_close_on_the_boundary_stays_sampled(self, api: Api) -> None:
        thinking = api.rollout("1+1=?", max_tokens=40, thinking_budget_tokens=30)[0]["thinking_budget"]
        budget = thinking["thinking_tokens"]
        assert forced(api.rollout("1+1=?", max_tokens=40, thinking_budget_tokens=budget)[1]) == []
        assert len(forced(api.rollout("1+1=?", max_tokens=40, thinking_budget_tokens=budget - 1)[1])) == 1

    def test_without_a_budget_nothing_is_forced(self, api: Api) -> None:
        _, record = api.rollout(LONG, max_tokens=10)
        assert forced(record) == []
        assert "thinking_budget" not in record["sampling"]

    def test_a_close_of_several_tokens(self, multi_close_api: Api) -> None:
        close = multi_close_api.service.model.close.ids
        assert len(close) > 1
        for budget in (0, 2, 5):
            _, record = multi_close_api.rollout(LONG, max_tokens=60, thinking_budget_tokens=budget)
            actions = forced(record)
            assert [action["token_id"] for action in actions] == list(close)
            first = record["prompt_token_count"] + budget
            assert [a["sequence_index"] for a in actions] == list(range(first, first + len(close)))
            assert record["sampling"]["thinking_budget"]["close_token_ids"] == list(close)

    @pytest.mark.parametrize(
        ("fields", "trigger"), [({"max_tokens": 5}, "max_tokens"), ({"thinking_budget_tokens": 2}, "tokens")]
    )
    def test_a_close_that_had_begun(self, multi_close: Path, fields: Body, trigger: str) -> None:
        """What the model wrote of the close stays sampled; only the rest of it is forced."""
        with staging(model__path=str(multi_close)) as staged:
            api, stage = Api(staged.server), staged.stage
            close: list[int] = list(api.service.model.close.ids)
            stage.say("1+", [close[0]], "2+3=5")
            limits: Body = {"max_tokens": 20, "thinking_budget_tokens": 1000, **fields}
            choice, record = api.rollout(**limits)
        assert choice["thinking_budget"]["trigger"] == trigger
        assert choice["thinking_budget"]["thinking_tokens"] == 2
        assert ids_of(record)[2 : 2 + len(close)] == close
        sources = [action["source"] for action in record["action_tokens"]][: 2 + len(close)]
        assert sources == ["sampled"] * 3 + ["forced"] * (len(close) - 1)

    def test_a_natural_close_whose_last_token_merges(self, multi_close_api: Api) -> None:
        choice, record = multi_close_api.rollout("1+1=?", max_tokens=40, thinking_budget_tokens=30)
        assert choice["thinking_budget"]["closed"] is True
        assert forced(record) == []
        text = decode(multi_close_api, ids_of(record))
        assert "</think>" in text
        # The id of the bare tag's last piece does not occur: it took the line feeds with it.
        assert multi_close_api.service.model.close.ids[-1] not in ids_of(record)

    def test_scripted_close_in_pieces(self, scripted_api: Api, stage: Stage) -> None:
        # The tag written byte by byte is a natural close, so everything is sampled.
        stage.say("so", stage.bytes("</think>"), "yes")
        choice, record = scripted_api.rollout(max_tokens=60, thinking_budget_tokens=50)
        assert forced(record) == []
        assert choice["message"] == {"role": "assistant", "reasoning_content": "so", "content": "yes"}


class TestLogprobs:
    @pytest.mark.parametrize("content", PROMPTS)
    @pytest.mark.parametrize("fields", [{}, {"thinking_budget_tokens": 4}])
    def test_scoring_gives_the_same(self, api: Api, content: str, fields: Body) -> None:
        _, record = api.rollout(content, max_tokens=60, seed=5, **UNTRUNCATED, **fields)
        assert_scored_alike(api, record)

    def test_over_call_boundaries(self, api: Api) -> None:
        content = " ".join(f"{i}+{i}={2 * i}." for i in range(40))
        _, record = api.rollout(content, max_tokens=80, **UNTRUNCATED)
        assert record["prompt_token_count"] > 3 * 63
        assert_scored_alike(api, record)

    def test_under_load(self, api: Api) -> None:
        with Load(api, 15):
            for content in PROMPTS:
                assert_scored_alike(api, api.rollout(content, max_tokens=40, **UNTRUNCATED)[1])

    def test_a_warm_cache(self, api: Api) -> None:
        content = " ".join(f"{i}-{i}={i}." for i in range(40))
        # The prefix comes from a request that was not exact, then from one that was.
        api.chat(content, max_tokens=1)
        first = api.rollout(content, max_tokens=20, seed=3, **LOUD)[1]
        second = api.rollout(content, max_tokens=20, seed=3, **LOUD)[1]
        assert drawn(first) == drawn(second)
        assert_scored_alike(api, api.rollout(content, max_tokens=20, **UNTRUNCATED)[1])

    def test_zero_at_temperature_zero(self, api: Api) -> None:
        _, record = api.rollout(max_tokens=30)
        assert logprobs(record) == [0] * len(record["action_tokens"])

    @pytest.mark.parametrize(
        "policy",
        [
            {"temperature": 1.5, "top_k": 0, "top_p": 1},
            {"temperature": 4.0, "top_k": 5, "top_p": 1},
            {"temperature": 1.6, "top_k": 0, "top_p": 0.8},
            {"temperature": 2.0, "top_k": 0, "top_p": 1, "min_p": 0.02},
            {"temperature": 4.0, "top_k": 20, "top_p": 0.95},
            {"temperature": 3.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
            {"temperature": 1.8, "top_k": 768, "top_p": 0.999},
        ],
    )
    def test_truncated_ones_are_renormalised(self, api: Api, reference: Reference, policy: Body) -> None:
        """Rebuilt from the model's own distributions."""
        surprises = 0
        for seed in (9, 10):
            _, record = api.rollout("Hello!", max_tokens=40, seed=seed, **policy)
            rows = reference.log_softmax(record["input_token_ids"])[record["prompt_token_count"] - 1 :]
            for action, row in zip(record["action_tokens"], rows, strict=False):
                expected = survivors(row, policy)[action["token_id"]]
                assert action["behavior_logprob"] == pytest.approx(math.log(expected), abs=1e-4)
                surprises += action["behavior_logprob"] < -0.05
        assert surprises > 0

    def test_penalties_change_them(self, api: Api) -> None:
        _, record = api.rollout("Hello!", max_tokens=30, seed=1, presence_penalty=2, **UNTRUNCATED)
        ids, prompt = record["input_token_ids"], record["prompt_token_count"]
        scores = observed(api.score(ids, 0), ids)[prompt:]
        pairs = zip(logprobs(record), scores, strict=True)
        assert any(abs((a or 0) - (b or 0)) > 1e-3 for a, b in pairs)


class TestRepeatable:
    @pytest.mark.parametrize("budget", [None, 6])
    def test_alone_and_among_fifteen(self, api: Api, budget: int | None) -> None:
        fields: Body = {**LOUD, "max_tokens": 40, "seed": 21, "thinking_budget_tokens": budget}
        alone = [drawn(api.rollout(content, **fields)[1]) for content in PROMPTS]
        with Load(api, 15):
            loaded = [drawn(api.rollout(content, **fields)[1]) for content in PROMPTS]
        assert loaded == alone
        assert [drawn(api.rollout(content, **fields)[1]) for content in PROMPTS] == alone

    def test_all_at_once(self, api: Api) -> None:
        jobs = [(content, seed) for content in PROMPTS for seed in range(4)]

        def roll(job: tuple[str, int]) -> tuple[list[int], list[float | None]]:
            return drawn(api.rollout(job[0], max_tokens=30, seed=job[1], **LOUD)[1])

        alone = [roll(job) for job in jobs]
        with ThreadPoolExecutor(len(jobs)) as pool:
            assert list(pool.map(roll, jobs)) == alone

    def test_in_another_server(self, api: Api) -> None:
        fields: Body = {**LOUD, "max_tokens": 40, "seed": 4}
        here = [drawn(api.rollout(content, **fields)[1]) for content in PROMPTS]
        with model_api(engine__parallel=2, engine__step_tokens=16) as other:
            assert [drawn(other.rollout(content, **fields)[1]) for content in PROMPTS] == here

    def test_through_preemptions(self, api: Api) -> None:
        fields: Body = {**LOUD, "max_tokens": 90, "seed": 6, "stop": ["no such text"]}
        contents = [f"{i}+{i}=? Think forever." for i in range(8)]
        alone = [drawn(api.rollout(content, **fields)[1]) for content in contents]
        with model_api(engine__ctx_size=256, engine__kv_size=256, engine__parallel=8) as tight:
            with ThreadPoolExecutor(8) as pool:
                found = list(pool.map(lambda c: drawn(tight.rollout(c, **fields)[1]), contents))
            assert tight.stats.preemptions > 0
        assert found == alone

    def test_a_plain_seeded_chat_says_the_same(self, api: Api) -> None:
        fields: Body = {**LOUD, "max_tokens": 40, "seed": 8}
        choice, _ = api.rollout(**fields)
        assert api.chat(**fields)["choices"][0]["message"] == choice["message"]
        assert api.chat(n=3, **fields)["choices"][0]["message"] == choice["message"]
        events = api.stream(**fields)
        deltas = [c["delta"] for event in events for c in event.get("choices", [])]
        assert "".join(d.get("content", "") for d in deltas) == choice["message"]["content"]


class TestHashes:
    def test_they_are_stable(self, api: Api) -> None:
        first, second = (api.rollout(max_tokens=3)[1] for _ in range(2))
        different = {"seed"}
        assert {k: v for k, v in first.items() if k not in different} == {
            k: v for k, v in second.items() if k not in different
        }

    def test_the_messages(self, api: Api) -> None:
        def hashed(*messages: Body) -> str:
            body = {"messages": list(messages), "max_tokens": 1, "temperature": 0, "rollout_provenance": True}
            record = api.whole(CHAT, body)["choices"][0]["rollout_provenance"]
            found: str = record["prompt_messages_sha256"]
            return found

        plain = {"role": "user", "content": "1+1=?"}
        parts = [{"type": "text", "text": "1+1"}, {"type": "input_text", "text": "=?"}]
        assert hashed(plain) == hashed({"content": "1+1=?", "role": "user", "unknown": 1})
        assert hashed(plain) == hashed({"role": "user", "content": parts})
        others = [
            hashed({"role": "user", "content": "1+2=?"}),
            hashed({"role": "system", "content": "1+1=?"}),
            hashed({**plain, "name": "me"}),
            hashed({"role": "assistant", "content": "2", "reasoning_content": "1+1=2"}, plain),
            hashed({"role": "assistant", "content": "2", "reasoning_content": "1+1=3"}, plain),
            hashed({"role": "system", "content": ""}, plain),
        ]
        assert len({hashed(plain), *others}) == 7

    def test_the_payload(self, api: Api) -> None:
        first = api.rollout(max_tokens=20, seed=1, **LOUD)[1]
        again = api.rollout(max_tokens=20, seed=1, **LOUD)[1]
        other = api.rollout(max_tokens=20, seed=2, **LOUD)[1]
        assert first["scored_payload_sha256"] == again["scored_payload_sha256"]
        assert first["input_token_ids"] != other["input_token_ids"]
        assert first["scored_payload_sha256"] != other["scored_payload_sha256"]
        assert first["prompt_messages_sha256"] == other["prompt_messages_sha256"]
        # The hash can be made anew from the record alone.
        payload = json.dumps(first["input_token_ids"], separators=(",", ":"))
        assert first["scored_payload_sha256"] == "sha256:" + hashlib.sha256(payload.encode()).hexdigest()

    def test_template_arguments_are_no_messages(self, api: Api) -> None:
        with_thinking = api.rollout(max_tokens=3)[1]
        without = api.rollout(max_tokens=3, chat_template_kwargs={"enable_thinking": False})[1]
        assert with_thinking["prompt_messages_sha256"] == without["prompt_messages_sha256"]
        assert with_thinking["scored_payload_sha256"] != without["scored_payload_sha256"]
        assert with_thinking["tokenizer"] == without["tokenizer"]
        assert with_thinking["behavior_policy"] == without["behavior_policy"]

    def test_the_served_id_is_a_name_only(self, api: Api) -> None:
        here = api.rollout(max_tokens=3)[1]
        with model_api(server__served_model_id="a name of its own") as other:
            there = other.rollout(max_tokens=3)[1]
        assert there["behavior_policy"].pop("served_model_id") == "a name of its own"
        assert here["behavior_policy"].pop("served_model_id") == "tiny-reasoner"
        assert there["behavior_policy"] == here["behavior_policy"]
        assert there["tokenizer"] == here["tokenizer"]

    def test_another_template(self, api: Api, tmp_path: Path) -> None:
        here = api.rollout(max_tokens=3)[1]
        file = tmp_path / "template.jinja"
        file.write_text(
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
            encoding="utf-8",
        )
        with model_api(model__chat_template_file=str(file)) as other:
            there = other.rollout(max_tokens=3)[1]
        assert there["tokenizer"]["chat_template_sha256"] != here["tokenizer"]["chat_template_sha256"]
        assert there["tokenizer"]["vocab_sha256"] == here["tokenizer"]["vocab_sha256"]
        assert there["behavior_policy"]["base_model_sha256"] == here["behavior_policy"]["base_model_sha256"]

    def test_another_model(self, api: Api, multi_close_api: Api) -> None:
        here, there = (server.rollout(max_tokens=3)[1] for server in (api, multi_close_api))
        assert here["behavior_policy"]["base_model_sha256"] != there["behavior_policy"]["base_model_sha256"]
        assert here["behavior_policy"]["served_model_id"] != there["behavior_policy"]["served_model_id"]

    def test_canonical_hashes_do_not_depend_on_key_order(self) -> None:
        assert sha256_of({"a": 1, "b": 2}) == sha256_of({"b": 2, "a": 1})


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"stream": True}, "stream"),
            ({"n": 2}, "n"),
            ({"ignore_eos": True}, "ignore_eos"),
            ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
            ({"tool_choice": "auto"}, "tool_choice"),
            ({"tool_choice": "none"}, "tool_choice"),
            ({"tool_choice": {}}, "tool_choice"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
            ({"max_tokens": 1, "thinking_budget_tokens": 0}, "max_tokens"),
            ({"max_tokens": 1, "thinking_budget_tokens": 9}, "max_tokens"),
            ({"max_completion_tokens": 1, "thinking_budget_ms": 9}, "max_completion_tokens"),
            ({"rollout_provenance": None}, "rollout_provenance"),
            ({"rollout_provenance": 1}, "rollout_provenance"),
            ({"chat_template_kwargs": {f"k{i}": i for i in range(257)}}, "chat_template_kwargs"),
            ({"chat_template_kwargs": {"k": "x" * 1_048_577}}, "chat_template_kwargs"),
        ],
    )
    def test_combinations(self, api: Api, fields: Body, param: str) -> None:
        error = api.refuse_chat(**{"rollout_provenance": True, **fields})
        assert error["param"] == param

    @pytest.mark.parametrize(
        "fields",
        [
            {"tools": []},
            {"tools": None},
            {"tool_choice": None},
            {"n": None},
            {"n": 1},
            {"ignore_eos": False},
            {"stream_options": {"include_usage": True}},
            {"max_tokens": None, "stop": ["."]},
            {"max_tokens": 2, "thinking_budget_tokens": 0},
            {
                "max_tokens": 1,
                "thinking_budget_tokens": 0,
                "chat_template_kwargs": {"enable_thinking": False},
            },
            {"adapter": None},
            {"chat_template_kwargs": {f"k{i}": i for i in range(255)}},
        ],
    )
    def test_what_is_allowed(self, api: Api, fields: Body) -> None:
        assert api.rollout("1+1=?", **{"max_tokens": 3, **fields})

    def test_room_for_the_close_only(self, multi_close_api: Api) -> None:
        close = len(multi_close_api.service.model.close.ids)
        for tokens in (close - 1, close):
            error = multi_close_api.refuse_chat(
                rollout_provenance=True, max_tokens=tokens, thinking_budget_tokens=5
            )
            assert error["param"] == "max_tokens"
        _, record = multi_close_api.rollout(LONG, max_tokens=close + 1, thinking_budget_tokens=5)
        sources = [action["source"] for action in record["action_tokens"]]
        assert sources == ["sampled"] + ["forced"] * close

    def test_it_cannot_be_skipped(self, scripted_api: Api, stage: Stage) -> None:
        go_on = threading.Event()

        def wait() -> int:
            assert go_on.wait(60)
            return stage.end

        stage.say("thinking", [wait])
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(scripted_api.rollout, PROMPT, max_tokens=20)
            try:
                wait_until(lambda: len(scripted_api.service._exchanges) == 1, "the rollout runs")
                (exchange,) = scripted_api.service._exchanges
                refused = scripted_api.server.client.post(SKIP, json={"request_id": exchange})
            finally:
                go_on.set()
            _, record = running.result(60)
        assert refused.status_code == 409
        assert refused.json()["code"] == "cannot_skip"
        assert forced(record) == []

    def test_a_body_of_it_is_otherwise_plain(self, api: Api) -> None:
        plain = api.chat(seed=1, max_tokens=10)["choices"][0]
        choice, _ = api.rollout(seed=1, max_tokens=10)
        del choice["rollout_provenance"]
        assert choice == plain


def assert_scored_alike(api: Api, record: Body) -> None:
    """Every sampled token scores as it was drawn, within 1e-6."""
    ids, prompt = record["input_token_ids"], record["prompt_token_count"]
    scores = observed(api.score(ids, 0), ids)[prompt:]
    for action, score in zip(record["action_tokens"], scores, strict=True):
        if action["source"] == "sampled":
            assert action["behavior_logprob"] == pytest.approx(score, abs=1e-6)


def survivors(row: NDArray[np.float64], policy: Body) -> dict[int, float]:
    """The renormalised distribution over what truncation leaves of a log-softmax."""
    order = np.argsort(-row, kind="stable")
    weights = np.exp((row[order] - row.max()) / policy["temperature"])
    if policy["top_k"]:
        weights = weights[: policy["top_k"]]
    weights = weights[weights >= policy.get("min_p", 0)]
    before = np.concatenate(([0.0], weights.cumsum()[:-1])) / weights.sum()
    weights = weights[before < policy["top_p"]]
    shares = weights / weights.sum()
    return {int(token): float(share) for token, share in zip(order, shares, strict=False)}
