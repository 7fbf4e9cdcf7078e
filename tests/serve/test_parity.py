"""The same prompt ids as the training's tokenizer, the same greedy ids as transformers and llama.cpp."""

from __future__ import annotations

import asyncio
import ctypes
import json
from collections.abc import Iterator
from importlib.resources import as_file, files
from typing import Any

import llama_cpp.llama_cpp as native
import pytest

from kiln.backends.llamacpp import LlamaModel, LlamaRunner
from kiln.chat.models.served import ServedModel
from kiln.chat.preparing.prepare import Prepared, prepare
from kiln.cli.assembly import BUNDLED
from kiln.dialects.kiln import decode_chat, to_turn
from kiln.engine.loop import BatchingEngine
from kiln.engine.ports import GenerationRequest
from servers import traffic
from servers.server import Server, serving_model

MAX_TOKENS = 160
KV_CELLS = 16384
TOGETHER = 8

Case = dict[str, Any]


def body_of(case: Case) -> dict[str, Any]:
    return {
        "messages": case["messages"],
        "tools": case["tools"],
        "chat_template_kwargs": case["template"],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }


def prepared(case: Case, model: ServedModel) -> Prepared:
    return prepare(to_turn(decode_chat(json.dumps(body_of(case)).encode())), model)


class OwnGreedy:
    """llama.cpp's greedy sampler in a loop over its C API, nothing of kiln's engine."""

    def __init__(self) -> None:
        native.llama_backend_init()
        with as_file(files("kiln") / "models" / f"{BUNDLED}-f16.gguf") as path:
            self._model = native.llama_model_load_from_file(
                str(path).encode(), native.llama_model_default_params()
            )
        assert self._model
        self._vocab = native.llama_model_get_vocab(self._model)
        params = native.llama_context_default_params()
        params.n_ctx = 1024
        params.n_threads = params.n_threads_batch = 1
        self._context = native.llama_init_from_model(self._model, params)
        assert self._context
        self._sampler = native.llama_sampler_init_greedy()

    def close(self) -> None:
        native.llama_sampler_free(self._sampler)
        native.llama_free(self._context)
        native.llama_model_free(self._model)

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        buffer = (native.llama_token * (len(data) + 8))()
        count = native.llama_tokenize(self._vocab, data, len(data), buffer, len(buffer), True, True)
        assert count >= 0
        return list(buffer[:count])

    def generate(self, prompt: list[int]) -> list[int]:
        native.llama_memory_clear(native.llama_get_memory(self._context), True)
        written: list[int] = []
        feed = prompt
        while len(written) < MAX_TOKENS:
            tokens = (native.llama_token * len(feed))(*feed)
            batch = native.llama_batch_get_one(
                ctypes.cast(tokens, ctypes.POINTER(native.llama_token)), len(feed)
            )
            assert native.llama_decode(self._context, batch) == 0
            token = int(native.llama_sampler_sample(self._sampler, self._context, -1))
            written.append(token)
            if native.llama_vocab_is_eog(self._vocab, token):
                break
            feed = [token]
        return written


@pytest.fixture(scope="module")
def own_greedy() -> Iterator[OwnGreedy]:
    own = OwnGreedy()
    yield own
    own.close()


def generate(llama: LlamaModel, requests: list[GenerationRequest], together: int) -> list[list[int]]:
    """What kiln's engine writes, so many requests at a time."""

    async def run() -> list[list[int]]:
        engine = BatchingEngine(
            lambda: LlamaRunner(llama, sequences=2 * together, kv_cells=KV_CELLS, threads=1),
            pieces=llama.pieces,
            context_length=4096,
            parallel=together,
        )
        await engine.start()
        try:

            async def one(request: GenerationRequest) -> list[int]:
                ids: list[int] = []
                async for delivery in engine.submit(request):
                    ids += [token.token_id for token in delivery.tokens]
                return ids

            written: list[list[int]] = []
            for start in range(0, len(requests), together):
                written += await asyncio.gather(*map(one, requests[start : start + together]))
            return written
        finally:
            await engine.stop()

    return asyncio.run(run())


def test_there_are_enough_cases(reference: list[Case]) -> None:
    assert len(reference) == 50
    assert len({case["kind"] for case in reference}) >= 4
    assert any(case["tools"] for case in reference)
    assert any(not case["template"]["enable_thinking"] for case in reference)


def test_prompts_are_rendered_alike(
    reference: list[Case], llama: LlamaModel, model: ServedModel, own_greedy: OwnGreedy
) -> None:
    for case in reference:
        ids = list(prepared(case, model).prompt_ids)
        assert b"".join(llama.pieces[i] for i in ids).decode() == case["text"]
        assert ids == case["prompt_ids"]
        assert ids == own_greedy.tokenize(case["text"])


@pytest.mark.parametrize("together", [1, TOGETHER])
def test_greedy_output_is_that_of_the_reference(
    reference: list[Case], llama: LlamaModel, model: ServedModel, together: int
) -> None:
    requests = [prepared(case, model).requests[0] for case in reference]
    written = generate(llama, requests, together)
    differing = [
        (case["text"], ids, case["output_ids"])
        for case, ids in zip(reference, written, strict=True)
        if ids != case["output_ids"]
    ]
    assert differing == []


def test_greedy_output_is_that_of_llama_cpp(
    reference: list[Case], llama: LlamaModel, model: ServedModel, own_greedy: OwnGreedy
) -> None:
    alone = [own_greedy.generate(case["prompt_ids"]) for case in reference]
    requests = [prepared(case, model).requests[0] for case in reference]
    assert generate(llama, requests, 1) == alone
    assert generate(llama, requests, TOGETHER) == alone


async def test_the_server_answers_with_the_reference_text(reference: list[Case], server: Server) -> None:
    async with traffic.async_client(server.url) as client:

        async def one(case: Case) -> None:
            response = await client.post(traffic.CHAT, json=body_of(case))
            body = response.json()
            message = body["choices"][0]["message"]
            assert body["usage"] == {
                "prompt_tokens": len(case["prompt_ids"]),
                "completion_tokens": len(case["output_ids"]),
                "total_tokens": len(case["prompt_ids"]) + len(case["output_ids"]),
            }
            text = case["output_text"].removesuffix("<|im_end|>").removesuffix("<|endoftext|>")
            thought, close, answer = text.rpartition("</think>")
            if case["template"]["enable_thinking"] and not close:
                thought, answer = text, ""  # cut while it was thinking
            assert message.get("reasoning_content", "") == thought.strip("\n")
            if "<tool_call>" in answer:
                assert len(message["tool_calls"]) == answer.count("<tool_call>")
                assert body["choices"][0]["finish_reason"] == "tool_calls"
            else:
                assert message["content"] == answer.lstrip("\n")

        for start in range(0, len(reference), TOGETHER):
            await asyncio.gather(*map(one, reference[start : start + TOGETHER]))


def test_a_seed_repeats_whatever_is_cached() -> None:
    """Sampled at a temperature at which the last bits of the logits decide."""

    def draw(server: Server, seed: int) -> str:
        body = server.ask(seed=seed, temperature=50, top_p=1, max_tokens=60)
        return json.dumps([body["choices"][0]["message"], body["usage"]])

    with serving_model() as server:
        cold = {seed: draw(server, seed) for seed in range(6)}
        assert cold == {seed: draw(server, seed) for seed in range(6)}
    with serving_model() as server:
        server.ask()
        server.ask(seed=9, temperature=1)
        server.ask()
        for _ in range(3):
            assert cold == {seed: draw(server, seed) for seed in range(6)}


async def test_a_seed_repeats_in_company(server: Server) -> None:
    """Alone, among others with a seed, and among others without one."""

    def body(seed: int | None) -> dict[str, Any]:
        fields = {} if seed is None else {"seed": seed}
        message = {"role": "user", "content": "3+8-2+7=?"}
        return {"messages": [message], "temperature": 50, "top_p": 1, "max_tokens": 60, **fields}

    async with traffic.async_client(server.url) as client:

        async def draw(seed: int | None) -> str:
            answer = (await client.post(traffic.CHAT, json=body(seed))).json()
            return json.dumps([answer["choices"][0]["message"], answer["usage"]])

        alone = [await draw(seed) for seed in range(TOGETHER)]
        assert len(set(alone)) == TOGETHER
        assert await asyncio.gather(*map(draw, range(TOGETHER))) == alone
        mixed = await asyncio.gather(*(draw(seed) for seed in range(TOGETHER)), *map(draw, [None] * TOGETHER))
        assert mixed[:TOGETHER] == alone
