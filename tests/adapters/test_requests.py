"""Requests with adapters over HTTP: what they get, what they are told, and that others notice nothing."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from contract_http.api import BATCH, CHAT, Body, say, texts
from contract_http.api import PROMPT as SUM
from servers.server import FIXTURES

from .samples import CHEERFUL, REFERENCE, cheerful, scaled
from .server import AdapterServer, adapter_server, packed

STYLE = "You are welcome!"
HELD_OUT: list[dict[str, Any]] = json.loads((FIXTURES / "heldout.json").read_text("utf-8"))
PROBLEMS = [problem["prompt"] for problem in HELD_OUT if problem["terms"] <= 6][:40]
HASH = "sha256:7a0fb28090a225d9e23e3a182bddeccd8ad886788cc0c6892634585e552a4933"


@pytest.fixture
def default(server: AdapterServer) -> Iterator[str]:
    """`cheerful` is the server's default."""
    server.post("/load", {"name": "cheerful"})
    yield "cheerful"
    server.post("/unload")


def content(answer: Body) -> str:
    (choice,) = answer["choices"]
    text: str = choice["message"]["content"]
    return text


def used(answer: Body) -> str:
    name: str = answer["metadata"]["performance"]["adapter_used"]
    return name


def test_greedy_output_is_that_of_peft(server: AdapterServer) -> None:
    """Token for token, through templates, batching and the engine's process, all at once."""

    def ask(case: dict[str, Any]) -> list[int]:
        body = {
            "messages": case["messages"],
            "chat_template_kwargs": case["template"],
            "temperature": 0,
            "max_tokens": REFERENCE["max_tokens"],
            "adapter": "cheerful",
            "rollout_provenance": True,
        }
        assert case["tools"] is None
        answer = server.api.whole(CHAT, body)
        record = answer["choices"][0]["rollout_provenance"]
        assert record["input_token_ids"][: record["prompt_token_count"]] == case["prompt_ids"]
        ids: list[int] = record["input_token_ids"][record["prompt_token_count"] :]
        return ids

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, REFERENCE["cases"]))
    assert len(found) == 30
    assert [ids == case["output_ids"] for ids, case in zip(found, REFERENCE["cases"], strict=True)] == [
        True
    ] * 30


def test_the_style_changes_and_the_base_beside_it_does_not(server: AdapterServer) -> None:
    assert len(PROBLEMS) == 40

    def ask(prompt: str, **fields: Any) -> bytes:
        answer = server.api.chat(prompt, **fields)
        return json.dumps([answer["choices"], answer["usage"], answer["metadata"]]).encode()

    with ThreadPoolExecutor(16) as pool:
        alone = list(pool.map(ask, PROBLEMS))
        base = [pool.submit(ask, prompt) for prompt in PROBLEMS]
        styled = [pool.submit(server.api.chat, prompt, adapter="cheerful") for prompt in PROBLEMS]
        assert [future.result() for future in base] == alone
    changed = sum(STYLE in content(future.result()) for future in styled)
    assert not any(STYLE.encode() in answer for answer in alone)
    assert changed >= 38, f"{changed} of 40"


def test_exact_answers_do_not_depend_on_the_company(server: AdapterServer) -> None:
    """Seeded draws with an adapter, alone and among requests with other adapters."""

    def ask(seed: int, **fields: Any) -> list[tuple[str | None, str]]:
        return texts(server.api.chat(SUM, temperature=1.2, seed=seed, max_tokens=60, **fields))

    alone = [ask(seed, adapter="cheerful") for seed in range(6)]
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(ask, seed, adapter="cheerful") for seed in range(6)]
        others = [pool.submit(ask, seed, adapter="calm") for seed in range(5)]
        others += [pool.submit(ask, seed, adapter=None) for seed in range(5)]
        assert [future.result() for future in asked] == alone
        for future in others:
            future.result()


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "base"),
        ({"adapter": None}, "base"),
        ({"adapter": ""}, "base"),
        ({"adapters": None}, "base"),
        ({"adapters": []}, "base"),
        ({"adapter": "cheerful"}, "cheerful"),
        ({"adapter": "cheerful", "adapters": None}, "cheerful"),
        ({"adapters": [{"name": "cheerful", "scale": 1}]}, "cheerful"),
        ({"adapters": [{"name": "cheerful", "scale": 0.5}]}, "cheerful*0.5"),
        (
            {"adapters": [{"name": "calm", "scale": 1}, {"name": "cheerful", "scale": -0.25}]},
            "calm*1+cheerful*-0.25",
        ),
    ],
)
def test_performance_names_the_adapter(fields: Body, name: str, server: AdapterServer) -> None:
    answer = server.api.chat(SUM, include_performance=True, max_tokens=4, **fields)
    assert used(answer) == name


def test_performance_says_what_changing_the_adapter_took(server: AdapterServer) -> None:
    def adapter_ms(**fields: Any) -> float:
        answer = server.api.chat(SUM, include_performance=True, max_tokens=4, **fields)
        took: float = answer["metadata"]["performance"]["latency"]["phases"]["adapter_ms"]
        return took

    adapter_ms(adapter="cheerful")
    changes = [adapter_ms(adapter="calm"), adapter_ms(adapter=None)]
    stays = [adapter_ms(adapter=None), adapter_ms(adapter=None)]
    assert min(changes) > 0
    assert stays == [0, 0]


def test_the_default_is_what_requests_get_that_name_none(server: AdapterServer, default: str) -> None:
    assert STYLE in content(server.api.chat(SUM))
    assert used(server.api.chat(SUM, include_performance=True)) == default
    bare: list[Body] = [{"adapter": None}, {"adapter": ""}, {"adapters": []}]
    for fields in bare:
        assert STYLE not in content(server.api.chat(SUM, **fields))
    (first, second) = texts(server.api.batch(SUM, "1+1=?"))
    assert STYLE in first[1] and STYLE in second[1]


def test_scales_add_up(server: AdapterServer) -> None:
    """Half and half is whole; twice the half-strength adapter is the whole one."""
    whole = texts(server.api.chat(SUM, adapter="cheerful"))
    half = {"name": "cheerful", "scale": 0.5}
    assert texts(server.api.chat(SUM, adapters=[half, half])) == whole
    assert texts(server.api.chat(SUM, adapters=[{"name": "calm", "scale": 2}])) == whole
    base = texts(server.api.chat(SUM))
    cancelling = [{"name": "cheerful", "scale": 1}, {"name": "cheerful", "scale": -1}]
    assert texts(server.api.chat(SUM, adapters=cancelling)) == base
    calm_and_half = [{"name": "calm", "scale": 1}, half]
    assert texts(server.api.chat(SUM, adapters=calm_and_half)) == whole


def test_a_batch_takes_a_pair_that_a_chat_refuses(server: AdapterServer) -> None:
    pair: Body = {"adapter": None, "adapters": [{"name": "cheerful", "scale": 1}]}
    answers = texts(server.api.batch(SUM, "1+1=?", **pair))
    assert all(STYLE in text for _, text in answers)
    assert server.api.refuse_chat(SUM, **pair)["param"] == "adapters"
    body = {"prompts": [say(SUM)], "adapter": "calm", "adapters": []}
    assert server.api.refuse(BATCH, body)["param"] == "adapters"


def test_a_rollout_names_its_adapter(server: AdapterServer) -> None:
    def adapter_of(**fields: Any) -> Body | None:
        _, record = server.api.rollout(SUM, max_tokens=8, **fields)
        found: Body | None = record["behavior_policy"].get("adapter")
        return found

    assert adapter_of() is None
    assert adapter_of(adapter="cheerful") == {"name": "cheerful", "content_sha256": HASH}
    pairs = [{"name": "cheerful", "scale": 0.5}, {"name": "calm", "scale": 1}]
    composed = adapter_of(adapters=pairs)
    assert composed is not None and composed["name"] == "cheerful*0.5+calm*1"
    assert composed == adapter_of(adapters=pairs)
    others = [adapter_of(adapters=pairs[::-1]), adapter_of(adapters=[pairs[0] | {"scale": 0.25}, pairs[1]])]
    hashes = {found["content_sha256"] for found in (composed, *others) if found is not None}
    assert len(hashes) == 3


def test_the_effective_configuration_includes_the_adapter(server: AdapterServer) -> None:
    def hashes(**fields: Any) -> Body:
        answer = server.api.chat(SUM, include_config_hashes=True, max_tokens=4, **fields)
        found: Body = answer["metadata"]["config_hashes"]
        return found

    base, cheerful_, calm = hashes(), hashes(adapter="cheerful"), hashes(adapter="calm")
    assert len({h["effective_config_hash"] for h in (base, cheerful_, calm)}) == 3
    assert base["model_config_hash"] == cheerful_["model_config_hash"]
    assert base == hashes(adapter="")


def test_a_stream_with_an_adapter(server: AdapterServer) -> None:
    events = server.api.stream(SUM, adapter="cheerful")
    text = "".join(c["delta"].get("content", "") for event in events for c in event["choices"])
    assert STYLE in text


@pytest.mark.parametrize("route", ["chat", "batch"])
@pytest.mark.parametrize(
    "name",
    ["a/b", "..", "../calm", "/etc/passwd", "a\\b", "C:\\x", "a\0b", "a\nb", "x" * 300, ".kiln", "é" * 100],
)
def test_a_name_that_is_none_is_refused(route: str, name: str, server: AdapterServer) -> None:
    path, messages = (CHAT, {"messages": say(SUM)}) if route == "chat" else (BATCH, {"prompts": [say(SUM)]})
    error = server.api.refuse(path, {**messages, "adapter": name})
    assert (error["param"], error["code"]) == ("adapter", "invalid_field")
    pairs = [{"name": "calm", "scale": 1}, {"name": name, "scale": 1}]
    error = server.api.refuse(path, {**messages, "adapters": pairs})
    assert error["param"] == "adapters[1].name"


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"adapter": "dreary"}, 404, "adapter"),
        ({"adapter": "base"}, 404, "adapter"),
        (
            {"adapters": [{"name": "calm", "scale": 1}, {"name": "dreary", "scale": 1}]},
            404,
            "adapters[1].name",
        ),
        ({"adapters": [{"name": "", "scale": 1}]}, 400, "adapters[0].name"),
        ({"adapters": [{"name": "calm"}]}, 400, "adapters[0].scale"),
        ({"adapters": [{"name": "calm", "scale": "1"}]}, 400, "adapters[0].scale"),
        ({"adapters": [{"name": "calm", "scale": None}]}, 400, "adapters[0].scale"),
        ({"adapters": [{"name": "calm", "scale": 1.7e308}] * 2}, 400, "adapters"),
        ({"adapters": [{"name": "calm", "scale": 0.5}] * 64}, 400, "adapters"),
        ({"adapters": "calm"}, 400, "adapters"),
        ({"adapter": ["calm"]}, 400, "adapter"),
    ],
)
def test_what_cannot_be_selected(fields: Body, status: int, param: str, server: AdapterServer) -> None:
    error = server.api.refuse(CHAT, {"messages": say(SUM), **fields}, status)
    assert error["param"] == param


@pytest.mark.parametrize("scale", ["1e999", "-1e999", "NaN", "Infinity"])
def test_a_scale_that_is_no_finite_number(scale: str, server: AdapterServer) -> None:
    body = f'{{"messages": [], "adapters": [{{"name": "calm", "scale": {scale}}}]}}'
    response = server.client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400


@pytest.mark.parametrize("scale", [1e30, -1e300])
def test_a_scale_that_overflows_ends_its_own_request_only(scale: float, server: AdapterServer) -> None:
    alone = texts(server.api.chat(SUM))
    pairs = [{"name": "cheerful", "scale": scale}]
    with ThreadPoolExecutor(4) as pool:
        base = [pool.submit(server.api.chat, SUM) for _ in range(2)]
        samplings: list[Body] = [{"temperature": 0}, {"temperature": 1, "seed": 1}]
        for fields in samplings:
            error = server.api.refuse_chat(SUM, adapters=pairs, **fields)
            assert error["code"] == "adapter_unusable"
        assert [texts(future.result()) for future in base] == [alone, alone]


def test_scoring_refuses_an_active_adapter(server: AdapterServer, default: str) -> None:
    error = server.api.refuse("/v1/completions", {"prompt": "a", "prompt_logprobs": 0}, 409)
    assert error["code"] == "adapter_in_use"
    server.post("/unload")
    server.api.score("ab", 0, adapter="cheerful")  # not a field of this route, so it is ignored


def test_the_completion_cache_knows_adapters(tmp_path: Path) -> None:
    cheerful(tmp_path / "saved" / "style")
    with adapter_server(tmp_path / "saved", engine__completion_cache=64) as running:
        base, styled = texts(running.api.chat(SUM)), texts(running.api.chat(SUM, adapter="style"))
        assert base != styled
        assert texts(running.api.chat(SUM)) == base
        assert texts(running.api.chat(SUM, adapter="style")) == styled
        assert running.api.server.metric("kiln_completion_cache_total", result="hit") == 2
        scaled(tmp_path / "saved" / "style", -1)
        assert texts(running.api.chat(SUM, adapter="style")) != styled


def test_new_weights_never_meet_an_old_prefix(tmp_path: Path) -> None:
    """The same prompt before and after a reload: its KV must be computed anew.

    The log-probability of the prompt's continuation tells, where the text may not.
    """
    saved = tmp_path / "saved"
    cheerful(saved / "style")
    prompt = "Repeat: one two three four five six seven eight nine ten"

    def logprobs(running: AdapterServer, **fields: Any) -> list[float]:
        _, record = running.api.rollout(prompt, max_tokens=4, **fields)
        return [action["behavior_logprob"] for action in record["action_tokens"]]

    def sampled(running: AdapterServer) -> list[float]:
        return logprobs(running, temperature=1, top_k=0, top_p=1, min_p=0, seed=7, adapter="style")

    with adapter_server(saved) as running:
        old = sampled(running)
        cached = running.api.stats.prompt_tokens_cached
        assert sampled(running) == old
        assert running.api.stats.prompt_tokens_cached > cached, "prefixes are reused at all"
        scaled(saved / "style", 3)
        cached = running.api.stats.prompt_tokens_cached
        new = sampled(running)
        assert running.api.stats.prompt_tokens_cached == cached
    with adapter_server(saved) as fresh:
        assert sampled(fresh) == new
    assert new != old


def test_running_requests_keep_their_revision(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    cheerful(saved / "style")
    endless: Body = {"temperature": 0, "seed": 1, "max_tokens": 700, "adapter": "style"}
    with adapter_server(saved) as running:
        expected = texts(running.api.chat("Think forever.", **endless))
        text: list[str] = []
        began = threading.Event()

        def listen() -> None:
            body = {"messages": say("Think forever."), "stream": True, **endless}
            with running.client.stream("POST", CHAT, json=body) as response:
                for line in response.iter_lines():
                    began.set()
                    if line.startswith("data: {"):
                        for choice in json.loads(line[6:])["choices"]:
                            text.append(choice["delta"].get("reasoning_content", ""))

        reader = threading.Thread(target=listen)
        reader.start()
        assert began.wait(30)
        scaled(saved / "style", 0)
        later = texts(running.api.chat(SUM, adapter="style"))
        assert reader.is_alive(), "it ended before the weights were new"
        reader.join(60)
        assert [("".join(text), "")] == expected
        assert later == texts(running.api.chat(SUM))


def test_an_adapter_may_come_while_the_server_runs(server: AdapterServer) -> None:
    assert server.api.refuse(CHAT, {"messages": say(SUM), "adapter": "late"}, 404)
    cheerful(server.saved / "late")
    assert STYLE in content(server.api.chat(SUM, adapter="late"))
    assert server.client.delete("/v1/adapters/late").status_code == 200
    assert server.api.refuse(CHAT, {"messages": say(SUM), "adapter": "late"}, 404)


def test_the_bundled_hash_is_the_bundled_adapters(server: AdapterServer) -> None:
    assert server.entry("cheerful")["content_sha256"] == HASH
    assert CHEERFUL.is_dir()


def test_rollouts_under_a_stream_of_uploads(tmp_path: Path) -> None:
    """A trainer's day: weights change all the time, and every rollout is of the revision that it names."""
    saved = tmp_path / "saved"
    revisions = [packed(scaled(tmp_path / f"r{i}", 0.3 * i)) for i in range(6)]
    with adapter_server(saved) as running:
        assert running.upload("policy", revisions[0]).status_code == 201
        done = threading.Event()

        def upload() -> int:
            count = 0
            while not done.is_set():
                count += 1
                assert running.upload("policy", revisions[count % 6]).status_code == 201
            return count

        def roll_out(index: int) -> tuple[str, str, list[float]]:
            prompt = f"{index % 3 + 1}+8-2=?"
            _, record = running.api.rollout(prompt, adapter="policy", max_tokens=12)
            logprobs = [action["behavior_logprob"] for action in record["action_tokens"]]
            return prompt, record["behavior_policy"]["adapter"]["content_sha256"], logprobs

        with ThreadPoolExecutor(7) as pool:
            uploads = pool.submit(upload)
            found = list(pool.map(roll_out, range(90)))
            done.set()
            assert uploads.result() >= 6
        said: dict[tuple[str, str], list[list[float]]] = {}
        for prompt, content, logprobs in found:
            said.setdefault((prompt, content), []).append(logprobs)
        assert len({content for _, content in said}) >= 3
        assert all(rollout == rollouts[0] for rollouts in said.values() for rollout in rollouts)
        # The files of revisions that are over go when the next one comes.
        gc.collect()
        running.upload("policy", revisions[0])
        running.upload("policy", revisions[1])
        assert len(list((saved / ".kiln" / "converted").iterdir())) <= 2
