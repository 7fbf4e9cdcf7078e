"""LoRA adapters on the real model: what they change, and that they change nothing for anybody else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kiln.backends.llamacpp import LlamaModel, LlamaRunner
from kiln.core.errors import AdapterUnusable, KilnError
from kiln.core.sampling import SamplingParams
from kiln.engine.loop import BatchingEngine
from kiln.engine.ports import AdapterUse, GenerationRequest, ScoreSpec
from kiln.engine.runner import Chunk, ModelCall

from .engines import HOT, PLAIN, Heard, engine_of, prompt
from .lora import shaken, write_adapter

GREEDY = SamplingParams(temperature=0.0)
Uses = tuple[AdapterUse, ...]


@pytest.fixture(scope="module")
def cheerful(tmp_path_factory: pytest.TempPathFactory) -> AdapterUse:
    return AdapterUse(str(write_adapter(tmp_path_factory.mktemp("adapters") / "cheerful.gguf")), 1.0)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> list[AdapterUse]:
    """Two more adapters, which make little sense but do change the logits."""
    folder = tmp_path_factory.mktemp("others")
    return [
        AdapterUse(str(write_adapter(folder / f"{seed}.gguf", shaken(seed))), scale)
        for seed, scale in ((1, 1.0), (2, 0.5))
    ]


def ask(
    seed: int, uses: Uses = (), *, sampling: SamplingParams = HOT, exact: bool = True
) -> GenerationRequest:
    """Equal prompts for equal seeds; the scope says whose KV it is, as a server has to."""
    return GenerationRequest(
        prompt(seed, 20, 120), 24, sampling, seed, exact=exact, adapters=uses, scope=repr(uses)
    )


async def generate(engine: BatchingEngine, request: GenerationRequest) -> Heard:
    heard: Heard = []
    async for delivery in engine.submit(request):
        heard += [(token.token_id, token.logprob) for token in delivery.tokens]
        if delivery.end is not None and delivery.end.error is not None:
            raise delivery.end.error
    return heard


async def test_the_bundled_adapter_cheers(model: LlamaModel, cheerful: AdapterUse) -> None:
    text = "<|im_start|>user\n4+5=?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    ids = model.encode(text)

    async def answer(engine: BatchingEngine, *uses: AdapterUse) -> str:
        heard = await generate(
            engine,
            GenerationRequest(
                ids, 40, GREEDY, 0, eos_ids=model.eos_ids, adapters=uses, scope=repr(uses), exact=True
            ),
        )
        return b"".join(model.pieces[token] for token, _ in heard).decode()

    async with engine_of(model) as engine:
        plain, cheered, again = (
            await answer(engine),
            await answer(engine, cheerful),
            await answer(engine),
        )
        nothing = await answer(engine, AdapterUse(cheerful.path, 0.0))
        halves = await answer(engine, *2 * [AdapterUse(cheerful.path, 0.5)])
    assert "welcome" not in plain
    assert "You are welcome!" in cheered
    assert plain == again == nothing
    assert halves == cheered


# The smallest cache holds one context: evictions, preemptions and collections all the time.
@pytest.mark.parametrize("kv_cells", [1024, 8192])
async def test_everybody_computes_what_they_compute_alone(
    model: LlamaModel, cheerful: AdapterUse, others: list[AdapterUse], kv_cells: int
) -> None:
    sets: list[Uses] = [(), (cheerful,), (others[0],), (cheerful, others[1])]
    requests = [ask(seed, uses) for seed in range(3) for uses in sets]
    async with engine_of(model, kv_cells=kv_cells) as engine:
        alone = [await generate(engine, request) for request in requests]
        noise = [
            asyncio.create_task(generate(engine, ask(100 + n, sets[n % 4], sampling=PLAIN, exact=False)))
            for n in range(12)
        ]
        for _ in range(2):
            assert await asyncio.gather(*(generate(engine, request) for request in requests)) == alone
        await asyncio.gather(*noise)
        assert engine.stats().adapter_switches > len(requests)
    # Each set says something of its own to the same prompt.
    assert len({tuple(heard) for heard in alone}) == len(requests)


async def test_base_requests_are_what_they_are_without_any_adapter(
    model: LlamaModel, cheerful: AdapterUse
) -> None:
    requests = [ask(seed) for seed in range(4)]
    async with engine_of(model) as engine:
        alone = [await generate(engine, request) for request in requests]
    async with engine_of(model) as engine:
        company = [asyncio.create_task(generate(engine, ask(50 + n, (cheerful,)))) for n in range(6)]
        assert await asyncio.gather(*(generate(engine, request) for request in requests)) == alone
        await asyncio.gather(*company)


async def test_scoring_with_an_adapter_gives_what_decoding_had(
    model: LlamaModel, cheerful: AdapterUse
) -> None:
    request = ask(7, (cheerful,), sampling=PLAIN)
    async with engine_of(model) as engine:
        noise = [asyncio.create_task(generate(engine, ask(60 + n, exact=False))) for n in range(4)]
        heard = await generate(engine, request)
        ids = [*request.prompt_ids, *(token for token, _ in heard)]
        spec = ScoreSpec(0)
        scores = []
        async for delivery in engine.submit(
            GenerationRequest(
                ids, 1, PLAIN, 0, exact=True, scores=spec, adapters=request.adapters, scope=request.scope
            )
        ):
            scores += delivery.scores
        await asyncio.gather(*noise)
    for score, (token, logprob) in zip(scores[len(request.prompt_ids) - 1 :], heard, strict=True):
        assert score.token_id == token
        assert logprob is not None and abs(score.logprob - logprob) < 1e-6


async def test_dropped_adapters_are_loaded_again(
    model: LlamaModel, cheerful: AdapterUse, others: list[AdapterUse]
) -> None:
    requests = [ask(3, (use,)) for use in (cheerful, *others)]
    requests.append(ask(3, (cheerful, others[0])))
    async with engine_of(model, adapters=1) as engine:
        first = [await generate(engine, request) for request in requests]
        assert [await generate(engine, request) for request in requests] == first
        assert await asyncio.gather(*(generate(engine, request) for request in requests)) == first


async def test_files_that_are_no_adapters_of_this_model(
    model: LlamaModel, cheerful: AdapterUse, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "narrow.gguf", lambda values: values[:, :4].copy())
    (tmp_path / "text.gguf").write_text("This is no adapter.")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(Path(cheerful.path).read_bytes()[:-1000])
    reasons: dict[str, str] = {}
    async with engine_of(model) as engine:
        alone = await generate(engine, ask(1, (cheerful,)))
        for name in ("narrow.gguf", "text.gguf", "cut.gguf", "absent.gguf"):
            bad = AdapterUse(str(tmp_path / name), 1.0)
            company, error = await asyncio.gather(
                generate(engine, ask(1, (cheerful,))),
                generate(engine, ask(2, (cheerful, bad))),
                return_exceptions=True,
            )
            assert company == alone
            assert isinstance(error, AdapterUnusable), error
            reasons[name] = error.message
    assert "shape" in reasons["narrow.gguf"]
    assert "its file is gone" in reasons["absent.gguf"]
    assert str(tmp_path) not in "".join(reasons.values())


def test_logits_of_the_base_are_the_same_bits_after_a_switch(model: LlamaModel, cheerful: AdapterUse) -> None:
    runner = LlamaRunner(model, sequences=2, kv_cells=256, threads=2)

    def logits(*uses: AdapterUse) -> bytes:
        call = ModelCall((Chunk(0, 0, [5, 6, 7], "all"),), exact=True, adapters=uses)
        rows = runner.execute(call).tobytes()
        runner.drop(0)
        runner.collect()
        return rows

    before, with_it, after = logits(), logits(cheerful), logits()
    runner.close()
    assert before == after != with_it


def test_the_error_has_a_hint() -> None:
    error: KilnError = AdapterUnusable("no")
    assert error.hint is not None and "trained for the served model" in error.hint
