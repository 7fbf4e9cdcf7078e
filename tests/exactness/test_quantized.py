"""Exact requests of quantized weights, whose kernels are others than those of the bundled half precision."""

from __future__ import annotations

import asyncio
from pathlib import Path

import llama_cpp.llama_cpp as native
import pytest

from kiln.backends.exactness import prove_exactness
from kiln.backends.llamacpp import LlamaModel, LlamaRunner
from kiln.backends.llamacpp.batch import RowBatch
from kiln.cli.assembly import load_model
from kiln.core.settings import Settings
from kiln.engine.ports import AdapterUse, GenerationRequest

from .engines import HOT, engine_of, generate, make_noise, prompt
from .lora import write_adapter
from .test_speculation import LUKEWARM, repetitive

KINDS = {"q8_0": native.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_0": native.LLAMA_FTYPE_MOSTLY_Q4_0}


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    bundled = load_model(Settings.default(), vocabulary_only=True)
    target = tmp_path_factory.mktemp("quantized") / f"{request.param}.gguf"
    params = native.llama_model_quantize_default_params()
    params.ftype = KINDS[request.param]
    params.nthread = 1
    assert native.llama_model_quantize(str(bundled.path).encode(), str(target).encode(), params) == 0
    bundled.close()
    return LlamaModel(target)


def test_the_self_test_sees_what_a_row_alone_would_lose(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the dummy row beside it, a row alone is computed otherwise in one way or another."""
    runner = LlamaRunner(model, sequences=4, kv_cells=1024, threads=2)
    assert prove_exactness(runner).holds
    fill = RowBatch.fill
    monkeypatch.setattr(RowBatch, "fill", lambda self, call, pad: fill(self, call, None))
    found = prove_exactness(runner)
    assert not found.holds and "differ by up to" in found.detail
    runner.close()


async def test_alone_and_in_company(model: LlamaModel, tmp_path: Path) -> None:
    uses = (AdapterUse(str(write_adapter(tmp_path / "cheerful.gguf")), 1.0),)
    # Prompts beyond 512 tokens: from there on attention has another way to add up for a row alone.
    requests = [GenerationRequest(prompt(i, 500, 560), 24, HOT, seed=i, exact=True) for i in range(3)]
    requests += [repetitive(seed, LUKEWARM) for seed in range(2)]
    requests += [repetitive(seed, LUKEWARM, uses) for seed in range(2)]
    async with engine_of(model, 8192, draft_tokens=0) as engine:
        alone = [await generate(engine, request) for request in requests]
        noise = [asyncio.create_task(make_noise(engine, seed)) for seed in range(3)]
        assert await asyncio.gather(*(generate(engine, request) for request in requests)) == alone
        await asyncio.gather(*noise)
    async with engine_of(model, 8192, draft_tokens=8) as engine:
        assert await asyncio.gather(*(generate(engine, request) for request in requests)) == alone
        assert engine.stats().drafts_accepted > 0
