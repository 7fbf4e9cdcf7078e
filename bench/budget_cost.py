"""What switching a budget on costs: decode throughput with a distant limit over throughput without one.

Both arms run the same 16 greedy streams on the bundled model, interleaved in one process.
"""

from __future__ import annotations

import asyncio
import statistics
import time

from kiln.backends.llamacpp import LlamaModel, LlamaRunner
from kiln.cli.assembly import load_model
from kiln.core.sampling import SamplingParams
from kiln.core.settings import Settings
from kiln.engine.loop import BatchingEngine
from kiln.engine.ports import GenerationRequest, ThinkingSpec
from kiln.thinking.gate import CloseSequence, GateLimits

STREAMS = 16
TOKENS = 192
RUNS = 31


def main() -> None:
    model = load_model(Settings.default())
    with_budget, without = asyncio.run(measure(model))
    ratios = [a / b for a, b in zip(with_budget, without, strict=True)]
    print(f"{STREAMS} streams x {TOKENS} tokens, {RUNS} interleaved runs each")
    print("| arm | median tokens/s |\n|---|---|")
    print(f"| budget on | {statistics.median(with_budget):.0f} |")
    print(f"| budget off | {statistics.median(without):.0f} |")
    print(
        f"\nratio on/off: median {statistics.median(ratios):.4f}, range {min(ratios):.3f}..{max(ratios):.3f}"
    )


async def measure(model: LlamaModel) -> tuple[list[float], list[float]]:
    engine = BatchingEngine(
        lambda: LlamaRunner(model, sequences=STREAMS, kv_cells=8192, threads=2),
        pieces=model.pieces,
        context_length=4096,
        parallel=STREAMS,
        on_stopped=model.close,
    )
    await engine.start()
    prompt = model.encode("<|im_start|>user\nThink forever.<|im_end|>\n<|im_start|>assistant\n<think>\n")
    close = CloseSequence.of(model.encode("</think>"), b"</think>")
    far = ThinkingSpec(close, GateLimits(max_tokens=10**6, max_time_s=3600.0, completion_tokens=10**6))
    with_budget: list[float] = []
    without: list[float] = []
    for run in range(RUNS + 1):
        # The order alternates, so that a drift of the machine does not favour one arm.
        arms = [(far, with_budget), (None, without)]
        for thinking, results in arms if run % 2 else reversed(arms):
            rate = await tokens_per_second(engine, prompt, thinking)
            if run > 0:
                results.append(rate)
    await engine.stop()
    return with_budget, without


async def tokens_per_second(
    engine: BatchingEngine, prompt: list[int], thinking: ThinkingSpec | None
) -> float:
    request = GenerationRequest(
        prompt_ids=prompt,
        max_tokens=TOKENS,
        sampling=SamplingParams(temperature=0.0),
        seed=1,
        thinking=thinking,
    )

    async def one() -> int:
        count = 0
        async for delivery in engine.submit(request):
            count += len(delivery.tokens)
        return count

    started = time.perf_counter()
    counts = await asyncio.gather(*(one() for _ in range(STREAMS)))
    return sum(counts) / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
