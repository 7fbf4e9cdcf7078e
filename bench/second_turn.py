"""What the host's memory gains: time to the first token of second turns, with and without it.

`python -m bench second-turn` for the defaults, or
`python -m bench.second_turn [model.gguf] [--conversations 12] [--tokens 600] [--runs 3]`.
Without a file it is that of KILN_BENCH_MODEL, or the bundled one.

Conversations have one turn each, then a second one in the same order: the cache keeps none of them meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kiln.backends.llamacpp import LlamaModel, LlamaRunner
from kiln.cli.assembly import load_model
from kiln.core.sampling import SamplingParams
from kiln.core.settings import Settings
from kiln.engine.loop import BatchingEngine
from kiln.engine.ports import GenerationRequest

GREEDY = SamplingParams(temperature=0.0)
SECOND_TURN = 40


async def first_token_ms(engine: BatchingEngine, ids: list[int], *, exact: bool) -> float:
    async for delivery in engine.submit(GenerationRequest(ids, 8, GREEDY, 0, exact=exact)):
        if delivery.end is not None:
            timings = delivery.end.timings
    assert timings.first_token is not None
    return 1000 * (timings.first_token - timings.submitted)


async def second_turns(
    model: LlamaModel, conversations: int, tokens: int, *, mib: int, exact: bool
) -> list[float]:
    """Milliseconds to the first token of every second turn, one after another."""
    engine = BatchingEngine(
        lambda: LlamaRunner(model, sequences=32, kv_cells=8192, threads=2),
        pieces=model.pieces,
        context_length=4096,
        parallel=16,
        host_bytes=mib * 2**20,
    )
    await engine.start()
    generator = np.random.default_rng(0)
    prompts = [generator.integers(10, 700, tokens).tolist() for _ in range(conversations)]
    for prompt in prompts:
        await first_token_ms(engine, prompt, exact=exact)
    more = generator.integers(10, 700, SECOND_TURN).tolist()
    found = [await first_token_ms(engine, prompt + more, exact=exact) for prompt in prompts]
    await engine.stop()
    return found


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=os.environ.get("KILN_BENCH_MODEL"))
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args(arguments)
    model = load_model(Settings.default()) if options.model is None else LlamaModel(options.model)
    print(f"{options.conversations} second turns after {options.tokens} tokens, ms to first token")
    print("| requests | without | with | ratio |\n|---|---|---|---|")
    for name, exact in (("ordinary", False), ("exact", True)):
        medians: dict[int, list[float]] = {0: [], 512: []}
        for _ in range(options.runs):
            for mib, kept in medians.items():
                found = asyncio.run(
                    second_turns(model, options.conversations, options.tokens, mib=mib, exact=exact)
                )
                kept.append(statistics.median(found))
        without, with_it = (statistics.median(kept) for kept in medians.values())
        print(f"| {name} | {without:.1f} | {with_it:.1f} | {with_it / without:.2f} |", flush=True)
    model.close()


if __name__ == "__main__":
    main(sys.argv[1:])
