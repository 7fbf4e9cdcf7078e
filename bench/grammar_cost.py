"""What a grammar costs: decode throughput of constrained streams over that of free ones.

Both arms run the same 16 streams on the bundled model, interleaved in one process. The grammar is that of
an endless list of records, as a tool's schema would describe them: no stream ends before its tokens do.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time

from kiln.backends.llamacpp import LlamaModel, LlamaRunner
from kiln.cli.assembly import load_model
from kiln.core.sampling import SamplingParams
from kiln.core.settings import Settings
from kiln.engine.loop import BatchingEngine
from kiln.engine.ports import GenerationRequest
from kiln.engine.sampling.grammar import GrammarCompiler
from kiln.text.lark import json_of

STREAMS = 16
TOKENS = 128
RUNS = 15
RECORDS = {
    "type": "array",
    "minItems": TOKENS,
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 0, "maximum": 9999},
            "name": {"type": "string", "maxLength": 20},
            "colour": {"enum": ["red", "green", "blue"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
        },
        "required": ["id", "name", "colour"],
        "additionalProperties": False,
    },
}
SAMPLERS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1, top-p 0.95": SamplingParams(temperature=1.0, top_p=0.95),
}


Rates = list[tuple[float, float]]


def main() -> None:
    model = load_model(Settings.default())
    results = asyncio.run(measure(model))
    print(f"{STREAMS} streams x {TOKENS} tokens, {RUNS} interleaved runs each, one compute thread")
    print("| sampling | free tokens/s | constrained tokens/s | ratio | by CPU of the engine thread |")
    print("|---|---|---|---|---|")
    for name, (constrained, free) in results.items():
        wall, cpu = ([a[i] / b[i] for a, b in zip(constrained, free, strict=True)] for i in (0, 1))
        print(
            f"| {name} | {statistics.median(rate for rate, _ in free):.0f} "
            f"| {statistics.median(rate for rate, _ in constrained):.0f} "
            f"| {spread(wall)} | {spread(cpu)} |"
        )


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.2f}..{max(ratios):.2f})"


async def measure(model: LlamaModel) -> dict[str, tuple[Rates, Rates]]:
    engine = BatchingEngine(
        lambda: LlamaRunner(model, sequences=STREAMS, kv_cells=8192, threads=1),
        pieces=model.pieces,
        context_length=4096,
        parallel=STREAMS,
        grammars=GrammarCompiler(model),
        on_stopped=model.close,
    )
    await engine.start()
    prompt = model.encode("<|im_start|>user\nList forever.<|im_end|>\n<|im_start|>assistant\n")
    grammar = f"start: {json_of(RECORDS)}"
    results = {}
    for name, sampling in SAMPLERS.items():
        constrained: Rates = []
        free: Rates = []
        for run in range(RUNS + 1):
            # The order alternates, so that a drift of the machine does not favour one arm.
            arms = [(grammar, constrained), (None, free)]
            for held_to, rates in arms if run % 2 else reversed(arms):
                requests = [
                    GenerationRequest(prompt, TOKENS, sampling, seed=seed, grammar=held_to)
                    for seed in range(STREAMS)
                ]
                rate = await tokens_per_second(engine, requests)
                if run > 0:
                    rates.append(rate)
        results[name] = (constrained, free)
    await engine.stop()
    return results


async def tokens_per_second(engine: BatchingEngine, requests: list[GenerationRequest]) -> tuple[float, float]:
    """By the clock on the wall, and by the CPU time of the engine thread, which others disturb less."""

    async def one(request: GenerationRequest) -> int:
        count = 0
        async for delivery in engine.submit(request):
            count += len(delivery.tokens)
        return count

    thread = next(thread for thread in threading.enumerate() if thread.name == "kiln-engine")
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    wall, cpu = time.perf_counter(), time.clock_gettime(clock)
    counts = await asyncio.gather(*map(one, requests))
    assert set(counts) == {TOKENS}
    total = sum(counts)
    return total / (time.perf_counter() - wall), total / (time.clock_gettime(clock) - cpu)


if __name__ == "__main__":
    main()
