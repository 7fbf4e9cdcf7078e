"""Drafted tokens under a grammar: the same answers, with fewer model calls."""

from __future__ import annotations

import asyncio

from kiln.backends.llamacpp import LlamaModel, LlamaRunner
from kiln.chat.models.served import ServedModel
from kiln.core.sampling import SamplingParams
from kiln.core.tokens import FinishReason
from kiln.engine.loop import BatchingEngine
from kiln.engine.ports import GenerationRequest
from kiln.engine.sampling.grammar import GrammarCompiler
from kiln.text.lark import json_of

# Every record repeats the names of the one before: much to draft.
RECORDS = {
    "type": "array",
    "minItems": 4,
    "maxItems": 4,
    "items": {
        "type": "object",
        "properties": {
            "temperature": {"type": "integer", "minimum": 0, "maximum": 99},
            "condition": {"enum": ["sunny", "cloudy", "rainy"]},
        },
        "required": ["temperature", "condition"],
        "additionalProperties": False,
    },
}


async def generate(llama: LlamaModel, draft_tokens: int) -> tuple[list[list[int]], int]:
    """What eight requests are answered, and how many tokens were drafted rightly."""
    engine = BatchingEngine(
        lambda: LlamaRunner(llama, sequences=16, kv_cells=4096, threads=1),
        pieces=llama.pieces,
        context_length=1024,
        parallel=8,
        draft_tokens=draft_tokens,
        grammars=GrammarCompiler(llama),
    )
    await engine.start()
    prompt = llama.encode("<|im_start|>user\nReport.<|im_end|>\n<|im_start|>assistant\n")
    grammar = f"start: {json_of(RECORDS)}"

    async def one(seed: int) -> list[int]:
        sampling = SamplingParams(temperature=float(seed % 2), top_k=0, top_p=1.0)
        request = GenerationRequest(
            prompt, 400, sampling, seed, eos_ids=llama.eos_ids, grammar=grammar, exact=True
        )
        ids: list[int] = []
        async for delivery in engine.submit(request):
            ids += [token.token_id for token in delivery.tokens]
            assert delivery.end is None or delivery.end.reason is FinishReason.STOP
        return ids

    answers = list(await asyncio.gather(*map(one, range(8))))
    accepted = engine.stats().drafts_accepted
    await engine.stop()
    return answers, accepted


async def test_drafts_change_nothing(bundled: tuple[LlamaModel, ServedModel]) -> None:
    plain, none = await generate(bundled[0], 0)
    drafted, accepted = await generate(bundled[0], 6)
    assert drafted == plain
    assert none == 0 and accepted > 20
