"""Requests that nobody would think of: valid ones, and ones with a single fault.

Strategies are written from the contract's field tables. Every answer keeps the contract, a fault is
answered with a 4xx that names its field, and the server goes on serving. KILN_FUZZ_EXAMPLES asks for
more examples than the default run has; they are the same ones every time unless KILN_FUZZ_RANDOM is set.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract.validators import validate, validate_chat_stream, validate_error

from .api import BATCH, CHAT, RESPONSES, SCORE, Api, Body

REQUESTS = {CHAT: "ChatCompletionRequest", BATCH: "BatchCompletionRequest", SCORE: "TextCompletionRequest"}
EXAMPLES = int(os.environ.get("KILN_FUZZ_EXAMPLES", "200"))


def fuzz(share: float) -> settings:
    """Settings of a test that gets this share of the examples."""
    return settings(
        max_examples=max(1, int(EXAMPLES * share)),
        deadline=None,
        derandomize="KILN_FUZZ_RANDOM" not in os.environ,
        suppress_health_check=list(HealthCheck),
        database=None,
    )


# Words of the template, markup and half characters beside anything that JSON can say.
words = st.sampled_from(
    [
        "",
        "1+1=?",
        "</think>",
        "<think>",
        "<|im_end|>",
        "<tool_call>{",
        "\x00",
        "é漢\U0001f600",
        "{{ 1 }}",
        "a" * 300,
    ]
)
text = words | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
name = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
number = (
    st.sampled_from([0, 1, -1, 0.5, 2, 1e-30, 1e30, -1e300, 100])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.integers(-(2**53), 2**53)
)
anything = st.recursive(
    st.none() | st.booleans() | number | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(name, inner, max_size=3),
    max_leaves=5,
)
small = st.integers(0, 8)
uint32 = st.sampled_from([0, 1, 20, 767, 768, 2**31, 2**32 - 1])
uint64 = st.sampled_from([0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
limit = st.none() | st.sampled_from([0, 1, 3, 2**40])


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


part = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "input_text", "output_text", "image_url"])}, optional={"text": text}
)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "odd"])},
    optional={
        "content": maybe(text | st.lists(part, max_size=3)),
        "reasoning_content": maybe(text),
        "name": maybe(text),
        "tool_call_id": maybe(text),
        "unknown": anything,
    },
)
messages = st.lists(message, min_size=1, max_size=3)
tool = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": name}, optional={"description": text}),
    }
)

SHARED: dict[str, st.SearchStrategy[Any]] = {
    "model": st.none() | st.just("tiny-reasoner"),
    "n": maybe(st.integers(1, 3)),
    "temperature": maybe(number),
    "top_p": maybe(number),
    "top_k": maybe(uint32),
    "min_p": maybe(number),
    "presence_penalty": maybe(number),
    "frequency_penalty": maybe(number),
    "repetition_penalty": maybe(number),
    "sampling_preset": maybe(st.sampled_from(["greedy", "qwen3-thinking-coding"]) | text),
    "max_completion_tokens": maybe(small),
    "ignore_eos": st.booleans(),
    "thinking_budget_tokens": limit,
    "thinking_budget_ms": limit,
    "stop": maybe(text | st.lists(text, max_size=3)),
    "seed": maybe(uint64),
    "adapter": st.none() | st.just(""),
    "tools": maybe(st.lists(tool, max_size=2)),
    "tool_choice": anything,
    "chat_template_kwargs": maybe(
        st.dictionaries(st.just("enable_thinking") | name, st.booleans() | text | number, max_size=2)
    ),
    "unknown": anything,
}
chat = st.fixed_dictionaries(
    # A limit is always there, so that no example takes long.
    {"messages": messages, "max_tokens": small},
    optional={
        **SHARED,
        "stream": st.booleans(),
        "stream_options": maybe(st.fixed_dictionaries({}, optional={"include_usage": st.booleans()})),
        "fold_reasoning_into_content": maybe(st.booleans()),
        "include_performance": maybe(st.booleans()),
        "include_config_hashes": maybe(st.booleans()),
        "rollout_provenance": st.booleans(),
    },
)
batch = st.fixed_dictionaries(
    {"prompts": st.lists(messages, min_size=1, max_size=3), "max_tokens": small}, optional=SHARED
)
scoring = st.fixed_dictionaries(
    {
        "prompt": text | st.lists(st.integers(0, 767), max_size=70),
        "prompt_logprobs": st.sampled_from([0, 1, 5, 256]),
    },
    optional={
        "model": st.none() | st.just("tiny-reasoner"),
        "max_tokens": st.sampled_from([None, 0, 1]),
        "n": st.sampled_from([None, 1]),
        "stream": st.just(False),
        "add_special_tokens": st.booleans(),
        "unknown": anything,
    },
)

not_text: list[Any] = [1, 1.5, True, [], {}]
not_number: list[Any] = ["1", True, [], {}]
not_count: list[Any] = [-1, 1.5, "1", True, [], {}, 2**70, -(2**70)]
not_flag: list[Any] = [None, 0, 1, "true", []]
# What no field of this name may hold, by route where they differ.
FAULTS: dict[str, list[Any]] = {
    "model": not_text,
    "n": [0, 65, *not_count],
    **{key: not_number for key in ("temperature", "top_p", "min_p")},
    **{key: not_number for key in ("presence_penalty", "frequency_penalty", "repetition_penalty")},
    "top_k": [2**32, *not_count],
    "sampling_preset": not_text,
    "max_tokens": not_count,
    "max_completion_tokens": not_count,
    "thinking_budget_tokens": not_count,
    "thinking_budget_ms": not_count,
    "ignore_eos": not_flag,
    "stop": [1, True, {}, [1], [None], [["a"]]],
    "seed": [2**64, *not_count],
    "adapter": not_text,
    "adapters": [
        1,
        "a",
        {},
        [1],
        [{}],
        [{"name": "a"}],
        [{"name": 1, "scale": 1}],
        [{"name": "", "scale": 1}],
    ],
    "tools": [1, "a", {}, True],
    "chat_template_kwargs": [1, "a", [], True],
}
CHAT_FAULTS: dict[str, list[Any]] = {
    **FAULTS,
    "messages": [None, 1, "a", {}, [1], ["a"], [[]], [{}], [{"role": 1}], [{"role": None}]],
    "stream": not_flag,
    "stream_options": [1, "a", [], {"include_usage": None}, {"include_usage": 1}],
    "fold_reasoning_into_content": [0, "true", []],
    "include_performance": [0, "true", []],
    "include_config_hashes": [0, "true", []],
    "rollout_provenance": not_flag,
}
BATCH_FAULTS: dict[str, list[Any]] = {
    **FAULTS,
    "prompts": [None, 1, "a", {}, [], [1], [{}], [[1]], [[{}]], [[{"role": 1}]], [[{"role": "user"}]] * 65],
}
SCORE_FAULTS: dict[str, list[Any]] = {
    "model": not_text,
    "prompt": [None, 1, {}, True, [-1], [1.5], ["a"], [None], [True], [2**32], [[1]]],
    "prompt_logprobs": [None, 257, *not_count],
    "max_tokens": [2, *not_count],
    "n": [0, 2, "1", 1.5, [], True],
    "stream": [True, None, 0, "false"],
    "add_special_tokens": not_flag,
}


def faulty(
    valid: st.SearchStrategy[Body], faults: dict[str, list[Any]]
) -> st.SearchStrategy[tuple[str, Body]]:
    """A valid request in which one field has a value that it must not have, and that field's name."""
    pairs = [(field, value) for field, values in faults.items() for value in values]
    broken = st.tuples(valid, st.sampled_from(pairs))
    return broken.map(lambda drawn: (drawn[1][0], {**drawn[0], drawn[1][0]: drawn[1][1]}))


def send(api: Api, path: str, body: object) -> tuple[int, Body]:
    """Post to a route. The answer's body, or the error's."""
    content = json.dumps(body, allow_nan=False).encode()
    headers = {"content-type": "application/json"}
    response = api.server.client.post(path, content=content, headers=headers)
    assert response.status_code < 500, response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        assert response.status_code == 200
        assert validate_chat_stream(response.content) == []
        return 200, {}
    answer: Body = response.json()
    if response.status_code == 200:
        assert validate(RESPONSES[path], answer) == []
    else:
        assert validate_error(answer) == []
        check_names_a_field(body, answer["error"])
    return response.status_code, answer


def check_names_a_field(body: object, error: Body) -> None:
    """A 4xx names a field that the request has or lacks, unless the body as a whole is wrong."""
    param = error["param"]
    if param is None:
        assert error["code"] in ("invalid_json", "queue_full"), error
        return
    root = param.split(".")[0].split("[")[0]
    known = set(SHARED) | {"messages", "prompts", "prompt", "prompt_logprobs", "max_tokens", "stream"}
    known |= {"adapters", "add_special_tokens", *CHAT_FAULTS}
    assert root in known, error


def refusals(path: str, body: Body) -> set[str]:
    """Fields that a request of the right types may be refused for."""
    allowed: set[str] = set()
    stop = body.get("stop")
    if stop is not None and (
        "" in (stop if isinstance(stop, list) else [stop])
        # It may overlap the closing tag, which matters where a budget applies.
        or any(body.get(key) is not None for key in ("thinking_budget_tokens", "thinking_budget_ms"))
    ):
        allowed.add("stop")
    if path == CHAT and body.get("stream") and (body.get("n") or 1) > 1:
        allowed.add("n")
    if path == CHAT and body.get("rollout_provenance"):
        allowed |= {
            "stream",
            "n",
            "ignore_eos",
            "tools",
            "tool_choice",
            "max_tokens",
            "max_completion_tokens",
        }
    # The model's own template decides what it makes of odd messages, tools and arguments.
    allowed |= {"messages", "prompts", "tools", "chat_template_kwargs", "tool_choice"}
    return allowed | ({"prompt", "prompt_logprobs"} if path == SCORE else set())


class TestValidRequests:
    @fuzz(1)
    @given(body=chat)
    def test_chat(self, api: Api, body: Body) -> None:
        self.check(api, CHAT, body)

    @fuzz(0.5)
    @given(body=batch)
    def test_batch(self, api: Api, body: Body) -> None:
        self.check(api, BATCH, body)

    @fuzz(0.5)
    @given(body=scoring)
    def test_scoring(self, api: Api, body: Body) -> None:
        status, answer = self.check(api, SCORE, body)
        if status == 200:
            entries = answer["choices"][0]["prompt_logprobs"]
            assert len(entries) == answer["usage"]["prompt_tokens"]
            assert all(math.isfinite(e["logprob"]) for entry in entries[1:] for e in entry.values())

    def check(self, api: Api, path: str, body: Body) -> tuple[int, Body]:
        status, answer = send(api, path, body)
        if not validate(REQUESTS[path], body):
            # By the schema it is valid: only what a schema cannot say may refuse it.
            assert status in (200, 400), answer
            if status == 400:
                assert answer["error"]["param"].split("[")[0].split(".")[0] in refusals(path, body), answer
        else:
            assert status == 400, f"accepted although {validate(REQUESTS[path], body)}"
        return status, answer


class TestFaults:
    @fuzz(0.5)
    @given(request=faulty(chat, CHAT_FAULTS))
    def test_chat(self, api: Api, request: tuple[str, Body]) -> None:
        self.check(api, CHAT, *request)

    @fuzz(0.5)
    @given(request=faulty(batch, BATCH_FAULTS))
    def test_batch(self, api: Api, request: tuple[str, Body]) -> None:
        self.check(api, BATCH, *request)

    @fuzz(0.5)
    @given(request=faulty(scoring, SCORE_FAULTS))
    def test_scoring(self, api: Api, request: tuple[str, Body]) -> None:
        self.check(api, SCORE, *request)

    def check(self, api: Api, path: str, field: str, body: Body) -> None:
        status, answer = send(api, path, body)
        assert status == 400, f"{field} = {body[field]!r} was accepted"
        param = answer["error"]["param"]
        assert param is not None, answer
        assert param.split("[")[0].split(".")[0] == field, answer


class TestAnyJson:
    @fuzz(0.5)
    @given(body=anything, path=st.sampled_from([CHAT, BATCH, SCORE]))
    def test_what_is_no_request(self, api: Api, body: object, path: str) -> None:
        headers = {"content-type": "application/json"}
        response = api.server.client.post(path, content=json.dumps(body).encode(), headers=headers)
        assert response.status_code == 400
        assert validate_error(response.json()) == []


@pytest.fixture(autouse=True, scope="module")
def still_serving(api: Api) -> Any:
    """After all of it the server answers as before, and nothing is left behind."""
    before = api.chat(max_tokens=20)
    yield
    api.server.wait_idle()
    after = api.chat(max_tokens=20)
    assert after["choices"] == before["choices"]
    assert not api.service._exchanges
