"""Text completions, tokenize and detokenize."""

from __future__ import annotations

import math
from typing import Any

import pytest

from servers.server import PROMPT

from .checks import events
from .conftest import Profile

TURN = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n<think>\n"
DONE = TURN + "\n</think>\n\n"


def complete(profile: Profile, prompt: Any, /, **fields: Any) -> Any:
    response = profile.post("completions", **{"prompt": prompt, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def stream(profile: Profile, prompt: Any, /, **fields: Any) -> list[Any]:
    fields = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}, **fields}
    response = profile.post("completions", prompt=prompt, **fields)
    assert response.status_code == 200, response.text
    chunks, done = events(response.content)
    assert done
    return chunks


def ids_of(profile: Profile, text: str) -> list[int]:
    ids: list[int] = profile.post("tokenize", prompt=text).json()["tokens"]
    return ids


def test_text_is_continued_as_it_is(profile: Profile) -> None:
    chat = profile.ask()["choices"][0]["message"]
    body = complete(profile, TURN, max_tokens=100)
    (choice,) = body["choices"]
    assert choice["text"] == f"{chat['reasoning_content']}\n</think>\n\n{chat['content']}"
    assert choice["finish_reason"] == "stop"
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["usage"]["prompt_tokens"] == len(ids_of(profile, TURN))


def test_the_default_is_sixteen_tokens(profile: Profile) -> None:
    body = complete(profile, TURN)
    assert body["usage"]["completion_tokens"] == 16 and body["choices"][0]["finish_reason"] == "length"


def test_a_prompt_that_ends_in_thinking_may_have_a_budget(profile: Profile) -> None:
    body = complete(profile, TURN, max_tokens=100, thinking_budget_tokens=5)
    text = body["choices"][0]["text"]
    assert len(ids_of(profile, text.split("</think>")[0])) == 5
    assert body["usage"]["thinking_budget"]["trigger"] == "tokens"
    free = complete(profile, DONE, thinking_budget_tokens=5)
    assert free["usage"]["thinking_budget"]["applied"] is False


def test_four_forms_of_prompts(profile: Profile) -> None:
    ids = ids_of(profile, TURN)
    one = complete(profile, TURN)["choices"][0]["text"]
    assert complete(profile, ids)["choices"][0]["text"] == one
    other = complete(profile, DONE)["choices"][0]["text"]
    for prompts in ([TURN, DONE], [ids, ids_of(profile, DONE)]):
        body = complete(profile, prompts, n=2)
        assert [(c["index"], c["text"]) for c in body["choices"]] == [
            (0, one), (1, one), (2, other), (3, other)
        ]  # fmt: skip
        assert body["usage"]["prompt_tokens"] == len(ids) + len(ids_of(profile, DONE))


def counts(usage: Any) -> Any:
    """Without what the state of the prefix cache decides."""
    return {k: v for k, v in usage.items() if k not in ("prompt_tokens_details", "estimated_cost")}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"echo": True},
        {"logprobs": 2},
        {"echo": True, "logprobs": 1, "max_tokens": 3},
        {"return_token_ids": True},
        {"echo": True, "logprobs": 0, "return_token_ids": True, "n": 2},
        {"stop": ["="]},
        {"max_tokens": 0, "echo": True},
    ],
)
def test_a_stream_says_what_the_answer_says(profile: Profile, fields: dict[str, Any]) -> None:
    prompts = [TURN, DONE]
    fields = {**fields, "seed": 1}  # exact, so that the bits do not depend on who else is running
    complete(profile, prompts, **fields)
    whole, chunks = complete(profile, prompts, **fields), stream(profile, prompts, **fields)
    assert counts(chunks[-1]["usage"]) == counts(whole["usage"]) and chunks[-1]["choices"] == []
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine if "finish_reason" in c] == [choice["finish_reason"]]
        for key in ("prompt_token_ids", "token_ids"):
            joined = [token for c in mine for token in c.get(key, [])]
            assert joined == choice.get(key, [])
        for key in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            joined = [entry for c in mine for entry in c.get("logprobs", {}).get(key, [])]
            assert joined == choice.get("logprobs", {}).get(key, []), key


def test_an_echoed_prompt_is_scored(profile: Profile) -> None:
    body = complete(profile, TURN, echo=True, max_tokens=0, logprobs=1)
    (choice,) = body["choices"]
    scores = choice["logprobs"]
    ids = ids_of(profile, TURN)
    assert choice["text"] == TURN == "".join(scores["tokens"])
    assert len(scores["token_logprobs"]) == len(ids) and scores["token_logprobs"][0] is None
    assert scores["top_logprobs"][0] is None
    for i, token in enumerate(scores["tokens"]):
        assert TURN[scores["text_offset"][i] :].startswith(token)
        if i > 0:
            own = scores["token_logprobs"][i]
            assert own == scores["top_logprobs"][i][token] <= max(scores["top_logprobs"][i].values()) <= 0
    response = profile.server.client.post("/v1/completions", json={"prompt": ids, "prompt_logprobs": 0})
    wanted = response.json()["choices"][0]["prompt_logprobs"]
    for token, own, entry in zip(ids[1:], scores["token_logprobs"][1:], wanted[1:], strict=True):
        assert own == entry[str(token)]["logprob"]


def test_scored_and_generated_tokens_stand_in_one_list(profile: Profile) -> None:
    (choice,) = complete(profile, TURN, echo=True, max_tokens=4, logprobs=1, seed=1)["choices"]
    scores = choice["logprobs"]
    assert "".join(scores["tokens"]) == choice["text"]
    assert len(scores["tokens"]) == len(ids_of(profile, TURN)) + 4
    again = complete(profile, choice["text"], echo=True, max_tokens=0, logprobs=1)["choices"][0]["logprobs"]
    assert again["tokens"] == scores["tokens"]
    for a, b in zip(again["token_logprobs"][1:], scores["token_logprobs"][1:], strict=True):
        assert math.isclose(a, b, abs_tol=1e-6)


def test_token_ids_for_trainers(profile: Profile) -> None:
    body = complete(profile, TURN, return_token_ids=True, max_tokens=100)
    (choice,) = body["choices"]
    assert choice["prompt_token_ids"] == ids_of(profile, TURN)
    assert len(choice["token_ids"]) == body["usage"]["completion_tokens"]
    spelled = profile.post("detokenize", tokens=choice["token_ids"]).json()["prompt"]
    assert spelled == choice["text"] + "<|im_end|>"
    assert "logprobs" not in choice


def test_stop_strings_and_ends(profile: Profile) -> None:
    (choice,) = complete(profile, TURN, stop="=11", max_tokens=50)["choices"]
    assert choice == {"index": 0, "text": "3+8", "finish_reason": "stop"}


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("prompt", {"prompt": []}),
        ("prompt", {}),
        ("prompt[1]", {"prompt": [[1], 2]}),
        ("prompt[0]", {"prompt": [""]}),
        ("prompt", {"prompt": [100_000]}),
        ("prompt[1]", {"prompt": [[1, 2], [100_000]]}),
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": "a" * 200_000}),
        ("suffix", {"prompt": "a", "suffix": "b"}),
        ("best_of", {"prompt": "a", "best_of": 2}),
        ("logprobs", {"prompt": "a", "logprobs": 6}),
        ("temperature", {"prompt": "a", "temperature": 3}),
        ("prompt", {"prompt": ["a"] * 129}),
        ("n", {"prompt": ["a"] * 65, "n": 2}),
        ("stream_options", {"prompt": "a", "stream_options": {}}),
        ("service_tier", {"prompt": "a", "service_tier": "scale"}),
    ],
)
def test_refusals(profile: Profile, param: str, fields: dict[str, Any]) -> None:
    assert profile.refuse("completions", **fields)["param"] == param


def test_tokens_and_back(profile: Profile) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    rendered = profile.post("tokenize", messages=messages, return_token_strs=True).json()
    assert rendered["tokens"] == ids_of(profile, TURN)
    assert rendered["count"] == len(rendered["tokens"]) and rendered["max_model_len"] == 4096
    assert "".join(rendered["token_strs"]) == TURN
    bare = profile.post("tokenize", messages=messages, add_generation_prompt=False).json()
    assert bare["tokens"] == ids_of(profile, TURN.split("<|im_start|>assistant")[0])
    assert profile.post("detokenize", tokens=rendered["tokens"]).json() == {"prompt": TURN}
    assert profile.refuse("tokenize")["param"] == "prompt"
    assert profile.refuse("tokenize", prompt="a", messages=messages)["param"] == "prompt"
    assert profile.refuse("detokenize", tokens=[5000])["param"] == "tokens"
    error = profile.refuse("tokenize", messages=[{"role": "robot"}])
    assert error["param"] == "messages[0].role"
