"""`POST /v1/completions/batch` on a real server."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import httpx
import pytest

from servers.raw import posted
from servers.scripted import Stage
from servers.server import chat_body, wait_until

from .api import BATCH, CHAT, UNTRUNCATED, Api, Body, model_api, say, texts

PROMPTS = ("3+4=?", "1+1=?", "9-5+2=?")
LONG = " ".join(f"{i}+{i}={2 * i}." for i in range(60))


class TestItems:
    def test_order_and_usage(self, api: Api) -> None:
        answer = api.batch(*PROMPTS, n=2, max_tokens=40)
        items = answer["completions"]
        places = [(item["prompt_index"], item["completion_index"]) for item in items]
        assert places == [(p, c) for p in range(3) for c in range(2)]
        # Greedy: each prompt's items are what the chat answers to it.
        for item, content in zip(items[::2], PROMPTS, strict=True):
            alone = api.chat(content, max_tokens=40)
            assert item["usage"] == alone["usage"]
            assert texts({"completions": [item]}) == texts(alone)
            assert item["finish_reason"] == alone["choices"][0]["finish_reason"]
        assert texts({"completions": items[::2]}) == texts({"completions": items[1::2]})

    def test_usage_counts_each_prompt_once(self, api: Api) -> None:
        answer = api.batch(*PROMPTS, n=3, temperature=1, max_tokens=20)
        items, usage = answer["completions"], answer["usage"]
        assert usage["completion_tokens"] == sum(item["usage"]["completion_tokens"] for item in items)
        assert usage["prompt_tokens"] == sum(item["usage"]["prompt_tokens"] for item in items[::3])

    def test_one_prompt_is_the_least(self, api: Api) -> None:
        answer = api.batch("1+1=?", max_tokens=1)
        assert len(answer["completions"]) == 1
        assert answer["completions"][0]["finish_reason"] == "length"
        assert answer["model"] == api.chat(max_tokens=1)["model"]

    @pytest.mark.parametrize("n", [None, 1])
    def test_n_defaults_to_one(self, api: Api, n: int | None) -> None:
        assert len(api.batch("1+1=?", "2+2=?", n=n, max_tokens=2)["completions"]) == 2

    @pytest.mark.parametrize(("prompts", "n"), [(1, 64), (64, 1), (8, 8)])
    def test_sixty_four_outputs(self, api: Api, prompts: int, n: int) -> None:
        answer = api.batch(*["1+1=?"] * prompts, n=n, max_tokens=2)
        assert len(answer["completions"]) == 64

    def test_no_token_at_all(self, api: Api) -> None:
        answer = api.batch(*PROMPTS, n=2, max_tokens=0, thinking_budget_tokens=3)
        assert answer["usage"]["completion_tokens"] == 0
        for item in answer["completions"]:
            assert item["finish_reason"] == "length"
            assert item["text"] == ""
            assert "thinking_budget" not in item
        assert answer["metadata"]["thinking_budget"]["configured"] is True

    def test_tool_calls(self, scripted_api: Api, stage: Stage) -> None:
        stage.say("</think>", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
        tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
        answer = scripted_api.batch("1+1=?", "2+2=?", tools=tools, max_tokens=200)
        for item in answer["completions"]:
            assert item["finish_reason"] == "tool_calls"
            (call,) = item["tool_calls"]
            assert call["type"] == "function"
            assert call["function"]["name"] == "add"
            assert json.loads(call["function"]["arguments"]) == {"a": 1}

    def test_stop(self, api: Api) -> None:
        whole = api.batch(*PROMPTS, max_tokens=40)["completions"]
        cut = api.batch(*PROMPTS, max_tokens=40, stop=" answer")["completions"]
        for before, after in zip(whole, cut, strict=True):
            assert after["text"] == before["text"].split(" answer")[0]
            assert after["finish_reason"] == "stop"

    def test_unknown_fields_are_ignored(self, api: Api) -> None:
        assert api.batch("1+1=?", max_tokens=1, stream=True, rollout_provenance=True, nonsense={})


class TestBudgets:
    def test_an_outcome_for_each_item_and_the_configuration_for_all(self, api: Api) -> None:
        answer = api.batch("1+1=?", "9-5+2+8=?", n=2, max_tokens=60, thinking_budget_tokens=8)
        assert answer["metadata"]["thinking_budget"] == {
            "configured": True,
            "max_tokens": 8,
            "tokens_source": "request",
            "time_source": "unlimited",
        }
        short, long = answer["completions"][:2], answer["completions"][2:]
        assert [item["thinking_budget"]["triggered"] for item in short] == [False, False]
        assert [item["thinking_budget"]["trigger"] for item in long] == ["tokens", "tokens"]
        for item in long:
            assert item["thinking_budget"]["thinking_tokens"] == 8
            assert item["thinking_budget"]["closed"] is True

    def test_time(self, api: Api) -> None:
        answer = api.batch(*PROMPTS, max_tokens=40, thinking_budget_ms=0, thinking_budget_tokens=None)
        assert answer["metadata"]["thinking_budget"] == {
            "configured": True,
            "max_time_ms": 0,
            "tokens_source": "request_unlimited",
            "time_source": "request",
        }
        assert {item["thinking_budget"]["trigger"] for item in answer["completions"]} == {"time"}

    def test_none_applies(self, api: Api) -> None:
        kwargs = {"enable_thinking": False}
        answer = api.batch("1+1=?", max_tokens=10, thinking_budget_tokens=4, chat_template_kwargs=kwargs)
        assert answer["metadata"]["thinking_budget"]["configured"] is True
        assert "thinking_budget" not in answer["completions"][0]

    def test_no_room_for_the_close(self, multi_close_api: Api) -> None:
        body = {"prompts": [say("1+1=?")], "max_tokens": 1, "thinking_budget_tokens": 4}
        error = multi_close_api.refuse(BATCH, body)
        assert (error["param"], error["code"]) == ("max_tokens", "thinking_close_cannot_fit")

    def test_a_stop_on_the_close(self, api: Api) -> None:
        body = {"prompts": [say("1+1=?")], "stop": ["</think>"], "thinking_budget_tokens": 4}
        error = api.refuse(BATCH, body)
        assert (error["param"], error["code"]) == ("stop", "stop_overlaps_thinking_close")


class TestSharedPrefill:
    @pytest.mark.parametrize("seed", [None, 3])
    @pytest.mark.parametrize("path", [BATCH, CHAT])
    def test_the_prompt_is_computed_once(self, api: Api, path: str, seed: int | None) -> None:
        # A prompt that no other test sends, so that nothing of it is cached.
        content = f"{path} {seed} {LONG}"
        before = api.stats
        body: Body = {"n": 8, "max_tokens": 4, "temperature": 1, "seed": seed}
        key = {"prompts": [say(content)]} if path == BATCH else {"messages": say(content)}
        usage = api.whole(path, {**key, **body})["usage"]
        after = api.stats
        computed = after.prompt_tokens_computed - before.prompt_tokens_computed
        cached = after.prompt_tokens_cached - before.prompt_tokens_cached
        assert usage["prompt_tokens"] > 500
        # All but one of the choices copy the prompt and compute its last token for themselves.
        assert computed + cached == 8 * usage["prompt_tokens"]
        assert computed <= usage["prompt_tokens"] + 7 * 2

    def test_the_engine_is_idle_afterwards(self, api: Api) -> None:
        api.batch(*PROMPTS, n=4, max_tokens=4)
        api.server.wait_idle()
        assert api.stats.running == 0


class TestFailures:
    def test_a_failed_choice_sinks_no_other_prompt(
        self, inline_api: Api, before_pick: Callable[[Callable[[int, int], None]], None]
    ) -> None:
        whole = inline_api.batch(*PROMPTS, max_tokens=30)["completions"]
        failed = threading.Event()

        def fail_once(choice: int, index: int) -> None:
            if index == 3 and not failed.is_set():
                failed.set()
                raise ValueError("a fault of one sequence")

        before_pick(fail_once)
        items = inline_api.batch(*PROMPTS, max_tokens=30)["completions"]
        (broken,) = [item for item in items if item["finish_reason"] == "error"]
        assert broken["text"] == ""
        assert broken["usage"]["prompt_tokens"] == whole[broken["prompt_index"]]["usage"]["prompt_tokens"]
        for item, good in zip(items, whole, strict=True):
            assert item is broken or item == good

    def test_a_failed_choice_sinks_no_sibling(
        self, inline_api: Api, before_pick: Callable[[Callable[[int, int], None]], None]
    ) -> None:
        whole = inline_api.batch(*PROMPTS, n=3, max_tokens=30)["completions"]

        def fail(choice: int, index: int) -> None:
            if choice == 1 and index == 2:
                raise ValueError("a fault of one sequence")

        before_pick(fail)
        answer = inline_api.batch(*PROMPTS, n=3, max_tokens=30)
        for item, good in zip(answer["completions"], whole, strict=True):
            if item["completion_index"] == 1:
                assert item["finish_reason"] == "error"
            else:
                assert item == good
        assert answer["usage"]["completion_tokens"] == sum(
            item["usage"]["completion_tokens"] for item in answer["completions"]
        )

    def test_all_failed(
        self, inline_api: Api, before_pick: Callable[[Callable[[int, int], None]], None]
    ) -> None:
        def fail(choice: int, index: int) -> None:
            raise ValueError("a fault of every sequence")

        before_pick(fail)
        answer = inline_api.batch(*PROMPTS, n=2, max_tokens=30)
        assert [item["finish_reason"] for item in answer["completions"]] == ["error"] * 6
        assert answer["usage"]["completion_tokens"] == 0
        inline_api.server.wait_idle()

    def test_n_choices_of_a_chat_fail_together(
        self, inline_api: Api, before_pick: Callable[[Callable[[int, int], None]], None]
    ) -> None:
        def fail(choice: int, index: int) -> None:
            if choice == 1 and index == 2:
                raise ValueError("a fault of one sequence")

        before_pick(fail)
        response = inline_api.server.post(n=3, max_tokens=20)
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        inline_api.server.wait_idle()

    def test_a_full_queue(self) -> None:
        with model_api(engine__parallel=1, engine__max_queue=2) as narrow:
            with posted(narrow.server.url, CHAT, chat_body(max_tokens=4000, ignore_eos=True)):
                wait_until(lambda: narrow.stats.running == 1, "the request runs")
                response = narrow.send(BATCH, {"prompts": [say("1+1=?")], "n": 3})
            assert response.status_code == 429
            assert response.headers["retry-after"]
            narrow.server.wait_idle()
            assert narrow.stats.waiting == 0
            assert len(narrow.batch("1+1=?", n=3, max_tokens=2)["completions"]) == 3

    def test_a_timeout_is_an_error_item(self) -> None:
        with model_api(engine__request_timeout_s=0.3) as hasty:
            answer = hasty.batch("Think forever.", max_tokens=4000, ignore_eos=True)
            (item,) = answer["completions"]
            assert item["finish_reason"] == "error"
            hasty.server.wait_idle()


class TestRefusals:
    @pytest.mark.parametrize(
        ("prompts", "n", "param"),
        [
            (65, 1, "prompts"),
            (33, 2, "n"),
            (2, 33, "n"),
            (64, 2, "n"),
            (1, 65, "n"),
            (1, 0, "n"),
            (0, 1, "prompts"),
        ],
    )
    def test_too_many_outputs(self, api: Api, prompts: int, n: int, param: str) -> None:
        error = api.refuse(BATCH, {"prompts": [say("1+1=?")] * prompts, "n": n})
        assert error["param"] == param

    @pytest.mark.parametrize(
        ("fields", "status", "param"),
        [
            ({"adapter": "a", "adapters": [{"name": "b", "scale": 1}]}, 400, "adapters"),
            ({"adapter": "", "adapters": [{"name": "b", "scale": 1}]}, 400, "adapters"),
            ({"adapter": "a", "adapters": []}, 400, "adapters"),
            ({"adapter": None, "adapters": [{"name": "b", "scale": 1}]}, 404, "adapters[0].name"),
            ({"adapters": [{"name": "b", "scale": 1}]}, 404, "adapters[0].name"),
            ({"adapter": "a"}, 404, "adapter"),
            ({"adapter": "a", "adapters": None}, 404, "adapter"),
            ({"adapters": [{"name": "", "scale": 1}]}, 400, "adapters[0].name"),
            ({"adapters": [{"name": "b"}]}, 400, "adapters[0].scale"),
            ({"adapters": [{"name": "b", "scale": "1"}]}, 400, "adapters[0].scale"),
        ],
    )
    def test_adapters(self, api: Api, fields: Body, status: int, param: str) -> None:
        error = api.refuse(BATCH, {"prompts": [say("1+1=?")], "max_tokens": 1, **fields}, status)
        assert error["param"] == param
        assert (error["code"] == "adapter_not_found") == (status == 404)

    @pytest.mark.parametrize(
        "fields",
        [{"adapter": None}, {"adapter": ""}, {"adapters": None}, {"adapter": None, "adapters": None}],
    )
    def test_no_adapter(self, api: Api, fields: Body) -> None:
        assert api.batch("1+1=?", max_tokens=1, **fields)

    def test_null_beside_an_empty_composition(self, api: Api) -> None:
        assert api.batch("1+1=?", max_tokens=1, adapter=None, adapters=[])
        error = api.refuse_chat(max_tokens=1, adapter=None, adapters=[])
        assert error["param"] == "adapters"

    def test_a_prompt_that_is_too_long_is_named(self, small_api: Api) -> None:
        prompts = [say("1+1=?"), say("9" * 200), say("1+1=?")]
        error = small_api.refuse(BATCH, {"prompts": prompts})
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == "prompts[1]"
        assert small_api.stats.running == 0

    def test_a_prompt_whose_template_fails_is_named(self, api: Api) -> None:
        prompts = [say("1+1=?"), [{"role": "assistant", "tool_calls": [1]}]]
        error = api.refuse(BATCH, {"prompts": prompts})
        assert error["code"] == "chat_template_failed"
        assert error["param"].startswith("prompts[1]")

    @pytest.mark.parametrize(
        ("message", "param"),
        [
            ({"content": "x"}, "prompts[1][0].role"),
            ({"role": 1}, "prompts[1][0].role"),
            ({"role": "user", "content": 5}, "prompts[1][0].content"),
            ({"role": "user", "name": []}, "prompts[1][0].name"),
            ("x", "prompts[1][0]"),
        ],
    )
    def test_a_bad_message_is_named(self, api: Api, message: object, param: str) -> None:
        error = api.refuse(BATCH, {"prompts": [say("1+1=?"), [message]]})
        assert error["param"] == param

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({}, "prompts"),
            ({"prompts": None}, "prompts"),
            ({"prompts": "1+1=?"}, "prompts"),
            ({"prompts": ["1+1=?"]}, "prompts[0]"),
            ({"prompts": [say("x")], "seed": 2**64}, "seed"),
            ({"prompts": [say("x")], "seed": -1}, "seed"),
            ({"prompts": [say("x")], "max_tokens": -1}, "max_tokens"),
            ({"prompts": [say("x")], "temperature": "1"}, "temperature"),
            ({"prompts": [say("x")], "ignore_eos": None}, "ignore_eos"),
            ({"prompts": [say("x")], "thinking_budget_ms": 1.5}, "thinking_budget_ms"),
            ({"prompts": [say("x")], "stop": [1]}, "stop[0]"),
        ],
    )
    def test_bad_fields(self, api: Api, body: Body, param: str) -> None:
        assert api.refuse(BATCH, body)["param"] == param

    def test_another_model(self, api: Api) -> None:
        error = api.refuse(BATCH, {"prompts": [say("x")], "model": "gpt-x"}, 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert api.batch("1+1=?", model=None, max_tokens=1)


class TestSeeds:
    def test_a_batch_item_is_the_chat_choice_of_the_same_index(self, api: Api) -> None:
        sampling: Body = {**UNTRUNCATED, "temperature": 1.5, "seed": 11, "n": 3, "max_tokens": 24}
        batch = texts(api.batch(*PROMPTS, **sampling))
        chats = [text for content in PROMPTS for text in texts(api.chat(content, **sampling))]
        assert batch == chats
        # Choices draw differently from one another.
        assert len(set(batch)) > 3

    def test_the_same_under_load(self, api: Api) -> None:
        sampling: Body = {**UNTRUNCATED, "temperature": 1.5, "seed": 12, "max_tokens": 40}
        alone = texts(api.batch(*PROMPTS, n=2, **sampling))
        with Load(api, 15):
            loaded = [texts(api.batch(*PROMPTS, n=2, **sampling)) for _ in range(3)]
        assert loaded == [alone] * 3

    @pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
    def test_edges(self, api: Api, seed: int) -> None:
        sampling: Body = {"temperature": 1.5, "top_k": 0, "top_p": 1, "seed": seed, "max_tokens": 16}
        assert texts(api.batch("1+1=?", **sampling)) == texts(api.batch("1+1=?", **sampling))

    def test_without_a_seed_draws_differ(self, api: Api) -> None:
        sampling: Body = {"temperature": 2, "top_k": 0, "top_p": 1, "max_tokens": 24, "n": 2}
        assert len(set(texts(api.batch("1+1=?", "1+1=?", **sampling)))) > 1


class TestDisconnects:
    def test_everything_is_freed(self, scripted_api: Api, stage: Stage) -> None:
        stage.repeat("word ")
        stage.pace_s = 0.002
        server = scripted_api.server
        before = server.outcomes()["unresolved"]
        body = {"prompts": [say("1+1=?")] * 4, "n": 5, "max_tokens": 4000, "thinking_budget_tokens": 3900}
        with posted(server.url, BATCH, body):
            runs = lambda: scripted_api.stats.running == 16 and scripted_api.stats.waiting == 4  # noqa: E731
            wait_until(runs, "the batch runs")
        wait_until(server.is_idle, "the engine is idle", within_s=10)
        wait_until(lambda: not scripted_api.service._exchanges, "no exchange is left", within_s=10)
        assert server.outcomes()["unresolved"] == before + 20


class Load:
    """Chats that keep an engine busy in the background, of several lengths and without seeds."""

    def __init__(self, api: Api, clients: int) -> None:
        self._url = api.server.url
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(clients)]
        self._failures: list[str] = []
        self._api = api

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        wait_until(lambda: self._api.stats.running >= min(4, len(self._threads)), "the load runs")
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        assert not self._failures, self._failures[0]

    def _run(self, number: int) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            turn = 0
            while not self._stop.is_set():
                turn += 1
                content = f"{number}+{turn} " * (1 + 7 * (turn % 4))
                body = {"messages": say(content), "max_tokens": 12, "temperature": 1, "ignore_eos": True}
                response = client.post(CHAT, json=body)
                if response.status_code != 200:
                    self._failures.append(response.text)
                    return
