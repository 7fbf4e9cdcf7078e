"""`POST /v1/completions`: prompt scores on a real server, against llama.cpp's own logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kiln.chat.models.served import ServedModel
from kiln.chat.scoring import MAX_PROMPT, prepare_scoring
from kiln.core.errors import ContextExceeded, KilnError
from servers.raw import posted
from servers.server import FIXTURES, wait_until

from .api import SCORE, Api, Body, model_api, observed
from .reference import Reference
from .test_batch import Load

TEXT = "3+8-2+7=? The answer is 16, isn't it?"
# A long enough prompt to need several model calls, of ids from all over the vocabulary.
LONG = [(37 * i + 5) % 700 for i in range(200)]


def entries(scored: Body) -> list[Any]:
    listed: list[Any] = scored["choices"][0]["prompt_logprobs"]
    return listed


class TestScores:
    @pytest.mark.parametrize("top_k", [0, 1, 5, 256])
    def test_against_the_model_itself(self, api: Api, reference: Reference, top_k: int) -> None:
        ids = LONG[:60]
        expected = reference.log_softmax(ids)
        scored = entries(api.score(ids, top_k))
        assert scored[0] is None
        assert len(scored) == len(ids)
        for position, (entry, row) in enumerate(zip(scored[1:], expected, strict=False), start=1):
            by_rank = np.argsort(-row, kind="stable")
            ranks = {int(token): rank for rank, token in enumerate(by_rank, start=1)}
            assert str(ids[position]) in entry
            wanted = {int(token) for token in by_rank[:top_k]} | {ids[position]}
            assert {int(key) for key in entry} == wanted
            for key, found in entry.items():
                assert found["logprob"] == pytest.approx(row[int(key)], abs=1e-6)
                assert found["rank"] == ranks[int(key)]
                assert found["decoded_token"] == api.pieces[int(key)].decode("utf-8", "replace")

    def test_probabilities_are_probabilities(self, api: Api) -> None:
        for entry in entries(api.score(TEXT, 256))[1:]:
            mass = sum(math.exp(found["logprob"]) for found in entry.values())
            assert 0 < mass <= 1 + 1e-9
            ranks = sorted(found["rank"] for found in entry.values())
            assert ranks[:256] == list(range(1, 257))
            by_rank = sorted(entry.values(), key=lambda found: found["rank"])
            logprobs = [found["logprob"] for found in by_rank]
            assert logprobs == sorted(logprobs, reverse=True)

    def test_text_is_its_ids(self, api: Api, reference: Reference) -> None:
        ids = reference.tokenize(TEXT, special=True)
        by_text, by_ids = api.score(TEXT, 3), api.score(ids, 3)
        assert entries(by_text) == entries(by_ids)
        assert by_text["usage"] == {
            "prompt_tokens": len(ids),
            "completion_tokens": 0,
            "total_tokens": len(ids),
        }
        assert [by_text["choices"][0][key] for key in ("index", "text", "finish_reason")] == [0, "", "length"]

    @pytest.mark.parametrize("flag", [True, False])
    def test_special_tokens(self, api: Api, reference: Reference, flag: bool) -> None:
        ids = reference.tokenize(TEXT, special=flag)
        assert entries(api.score(TEXT, 0, add_special_tokens=flag)) == entries(api.score(ids, 0))
        # The flag does not touch ids.
        assert entries(api.score(ids, 0, add_special_tokens=flag)) == entries(api.score(ids, 0))

    def test_control_tokens_in_text_are_themselves(self, api: Api) -> None:
        (end,) = (i for i, piece in enumerate(api.pieces) if piece == b"<|im_end|>")
        assert str(end) in entries(api.score("1+1=2<|im_end|>", 0))[-1]

    def test_one_token(self, api: Api) -> None:
        scored = api.score([5], 256)
        assert entries(scored) == [None]
        assert scored["usage"]["total_tokens"] == 1

    @pytest.mark.parametrize("length", [2, 62, 63, 64, 65, 126, 127, 128])
    def test_lengths_around_the_call_size(self, api: Api, length: int) -> None:
        whole = observed(api.score(LONG, 0), LONG)
        assert observed(api.score(LONG[:length], 0), LONG[:length]) == whole[:length]

    def test_bytes_that_are_no_text(self, api: Api) -> None:
        half = api.pieces.index("é".encode()[:1])
        (_, entry) = entries(api.score([5, half], 0))
        assert entry[str(half)]["decoded_token"] == "\N{REPLACEMENT CHARACTER}"

    @pytest.mark.parametrize(
        "fields",
        [
            {"max_tokens": 0},
            {"max_tokens": 1},
            {"max_tokens": None},
            {"n": 1},
            {"n": None},
            {"stream": False},
            {"model": None},
            {"logprobs": 3, "echo": True, "temperature": "hot"},
        ],
    )
    def test_what_changes_nothing(self, api: Api, fields: Body) -> None:
        assert entries(api.score(LONG[:20], 2, **fields)) == entries(api.score(LONG[:20], 2))

    def test_nothing_else_changes_them(self, api: Api) -> None:
        alone = [entries(api.score(LONG[:n], 4)) for n in (40, 100, 200)]
        with Load(api, 8):
            assert [entries(api.score(LONG[:n], 4)) for n in (40, 100, 200)] == alone
        assert [entries(api.score(LONG[:n], 4)) for n in (40, 100, 200)] == alone

    def test_the_whole_context(self, small_api: Api) -> None:
        assert len(entries(small_api.score(LONG[:128], 0))) == 128
        error = small_api.refuse(SCORE, {"prompt": LONG[:129], "prompt_logprobs": 0})
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")

    def test_a_prompt_that_fills_the_cache(self) -> None:
        with model_api(engine__ctx_size=256, engine__parallel=1) as tight:
            ids = [5] * 256
            assert observed(tight.score(ids, 0), ids)[1:]
            # A chat that needs the cells of it afterwards is served too.
            assert tight.chat(max_tokens=4)
            assert observed(tight.score(ids, 0), ids)[1:]


class TestFingerprint:
    def test_it_outlives_the_server_and_tells_models_apart(self, api: Api) -> None:
        first = api.score([5], 0)["system_fingerprint"]
        assert first.startswith("sha256:")
        assert api.score(LONG, 3)["system_fingerprint"] == first
        with model_api(
            server__served_model_id="another-name", server__default_thinking_enabled=False
        ) as again:
            # A name and defaults are no part of what computes scores.
            assert again.score([5], 0)["system_fingerprint"] == first
            assert again.score([5], 0)["model"] == "another-name"

    @pytest.mark.skipif(not (FIXTURES / "multi-close.gguf").exists(), reason="the fixture is not written yet")
    def test_another_model_has_another(self, api: Api, multi_close_api: Api) -> None:
        found = multi_close_api.score([5], 0)["system_fingerprint"]
        assert found != api.score([5], 0)["system_fingerprint"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"prompt": ""}, "prompt"),
            ({"prompt": []}, "prompt"),
            ({"prompt": None}, "prompt"),
            ({"prompt": ["a"]}, "prompt[0]"),
            ({"prompt": [5, "a"]}, "prompt[1]"),
            ({"prompt": [5, -1]}, "prompt[1]"),
            ({"prompt": [5, 1.5]}, "prompt[1]"),
            ({"prompt": [5, True]}, "prompt[1]"),
            ({"prompt": [5, 768]}, "prompt[1]"),
            ({"prompt": [5, 6, 2**32 - 1]}, "prompt[2]"),
            ({"prompt": [5, 2**32]}, "prompt[1]"),
            ({"prompt": [5, 2**70]}, "prompt[1]"),
            ({"prompt": [[5]]}, "prompt[0]"),
            ({"prompt": {"text": "a"}}, "prompt"),
            ({"prompt_logprobs": -1}, "prompt_logprobs"),
            ({"prompt_logprobs": 257}, "prompt_logprobs"),
            ({"prompt_logprobs": None}, "prompt_logprobs"),
            ({"prompt_logprobs": "1"}, "prompt_logprobs"),
            ({"prompt_logprobs": True}, "prompt_logprobs"),
            ({"max_tokens": 2}, "max_tokens"),
            ({"max_tokens": -1}, "max_tokens"),
            ({"max_tokens": "1"}, "max_tokens"),
            ({"n": 2}, "n"),
            ({"n": 0}, "n"),
            ({"n": "1"}, "n"),
            ({"stream": True}, "stream"),
            ({"stream": None}, "stream"),
            ({"stream": "false"}, "stream"),
            ({"add_special_tokens": None}, "add_special_tokens"),
            ({"add_special_tokens": 1}, "add_special_tokens"),
            ({"model": 1}, "model"),
            ({"prompt": [5] * 4097}, "prompt"),
            ({"prompt": "1+" * 4096}, "prompt"),
            # (300 - 1) * (256 + 1) and (257 - 1) * (256 + 1) candidates are too many.
            ({"prompt": [5] * 300, "prompt_logprobs": 256}, "prompt_logprobs"),
            ({"prompt": [5] * 257, "prompt_logprobs": 256}, "prompt_logprobs"),
        ],
    )
    def test_bad_fields(self, api: Api, fields: Body, param: str) -> None:
        error = api.refuse(SCORE, {"prompt": [5, 6], "prompt_logprobs": 1, **fields})
        assert error["param"] == param

    @pytest.mark.parametrize("missing", ["prompt", "prompt_logprobs"])
    def test_required_fields(self, api: Api, missing: str) -> None:
        body = {"prompt": [5, 6], "prompt_logprobs": 1}
        del body[missing]
        assert api.refuse(SCORE, body)["param"] == missing

    def test_the_most_candidates(self, api: Api) -> None:
        # Against the schema this body would take seconds.
        body = {"prompt": [5] * 256, "prompt_logprobs": 256}
        scored = entries(api.server.client.post(SCORE, json=body).json())
        assert [len(entry) >= 256 for entry in scored[1:]] == [True] * 255

    def test_another_model(self, api: Api) -> None:
        error = api.refuse(SCORE, {"prompt": [5], "prompt_logprobs": 0, "model": "gpt-x"}, 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        name = api.score([5], 0)["model"]
        assert api.score([5], 0, model=name)["model"] == name

    def test_the_longest_prompt(self, api: Api) -> None:
        # Prepared only: to score it takes the small model many seconds.
        model: ServedModel = api.service.model
        assert model.context_length == MAX_PROMPT == 4096

        def prepare(length: int, top_k: int = 0) -> object:
            return prepare_scoring([5] * length, top_k, model_id=None, add_special=True, model=model)

        assert prepare(4096)
        assert prepare(4096, 15)
        with pytest.raises(ContextExceeded):
            prepare(4097)
        with pytest.raises(KilnError):
            prepare(4096, 16)


def test_a_client_that_leaves_frees_the_engine(api: Api) -> None:
    api.server.wait_idle()
    body = {"prompt": [5] * 4096, "prompt_logprobs": 0}
    with posted(api.server.url, SCORE, body):
        wait_until(lambda: api.stats.running == 1, "the scoring runs")
    wait_until(lambda: api.stats.running == 0, "the engine is idle", within_s=20)
    assert api.chat(max_tokens=1)


def test_it_is_limited_in_time() -> None:
    with model_api(engine__request_timeout_s=0.3) as hasty:
        assert hasty.score(LONG[:20], 0)
        error = hasty.refuse(SCORE, {"prompt": [5] * 2500, "prompt_logprobs": 0}, 504)
        assert error["code"] == "request_timed_out"
        wait_until(lambda: hasty.stats.running == 0, "the engine is idle", within_s=20)
        assert hasty.score(LONG[:20], 0)


def test_greedy_tokens_rank_first(api: Api) -> None:
    _, record = api.rollout(max_tokens=30)
    ids, prompt = record["input_token_ids"], record["prompt_token_count"]
    found = entries(api.score(ids, 0))[prompt:]
    assert [entry[str(i)]["rank"] for entry, i in zip(found, ids[prompt:], strict=True)] == [1] * len(found)
