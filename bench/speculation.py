"""What prompt-lookup speculation gains: decode speed with and without, on repetitive and other answers.

`python -m bench speculation` for the defaults, or
`python -m bench.speculation [model.gguf] [--streams 1,4] [--tokens 128] [--runs 7]`.
Without a file it is that of KILN_BENCH_MODEL, or the bundled one.

The repetitive answer is a text of the prompt, repeated: its first words are given, and the model goes on.
The other one is drawn hot, so that little of it has been said before. Runs with and without alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kiln.backends.llamacpp import LlamaModel, LlamaRunner
from kiln.cli.assembly import load_model
from kiln.core.sampling import SamplingParams
from kiln.core.settings import Settings
from kiln.engine.loop import BatchingEngine
from kiln.engine.ports import EngineStats, GenerationRequest

GREEDY = SamplingParams(temperature=0.0)
HOT = SamplingParams(temperature=3.0, top_k=0, top_p=1.0)
TEXT = "".join(f"{n} apples and {n + 3} pears are {2 * n + 3} fruits in all.\n" for n in range(2, 30))
DRAFT_TOKENS = 8


@dataclass(frozen=True)
class Run:
    """Decode tokens a second of all streams together, model calls, drafted and accepted tokens."""

    speed: float
    steps: int
    drafted: int
    accepted: int


async def run(model: LlamaModel, sampling: SamplingParams, streams: int, tokens: int, draft: int) -> Run:
    engine = BatchingEngine(
        lambda: LlamaRunner(model, sequences=32, kv_cells=8192, threads=2),
        pieces=model.pieces,
        context_length=4096,
        parallel=16,
        draft_tokens=draft,
    )
    await engine.start()
    prompts = [model.encode(f"Copy text {n}.\n{TEXT}\nThe copy:\n{TEXT[:60]}") for n in range(streams)]
    for prompt in prompts:
        # Prefixes are computed before the clock starts.
        await speed(engine, GenerationRequest(prompt, 1, GREEDY, 0))
    before = engine.stats()
    speeds = await asyncio.gather(
        *(speed(engine, GenerationRequest(p, tokens, sampling, seed)) for seed, p in enumerate(prompts))
    )
    after = engine.stats()
    await engine.stop()
    return Run(sum(speeds), *_difference(before, after))


def _difference(before: EngineStats, after: EngineStats) -> tuple[int, int, int]:
    return (
        after.steps - before.steps,
        after.tokens_drafted - before.tokens_drafted,
        after.drafts_accepted - before.drafts_accepted,
    )


async def speed(engine: BatchingEngine, request: GenerationRequest) -> float:
    """Tokens a second after the first."""
    count = 0
    async for delivery in engine.submit(request):
        count += len(delivery.tokens)
        if delivery.end is not None:
            timings = delivery.end.timings
    assert timings.ended is not None and timings.first_token is not None
    return (count - 1) / max(timings.ended - timings.first_token, 1e-9)


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=os.environ.get("KILN_BENCH_MODEL"))
    parser.add_argument("--streams", default="1,4")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args(arguments)
    model = load_model(Settings.default()) if options.model is None else LlamaModel(options.model)
    print("| answer | streams | tokens/s | with drafts | ratio | calls | with drafts | accepted of drafted |")
    print("|---|---|---|---|---|---|---|---|")
    for name, sampling in (("repetitive", GREEDY), ("hot", HOT)):
        for streams in map(int, options.streams.split(",")):
            pairs = []
            for _ in range(options.runs):
                plain = asyncio.run(run(model, sampling, streams, options.tokens, 0))
                drafted = asyncio.run(run(model, sampling, streams, options.tokens, DRAFT_TOKENS))
                pairs.append((plain, drafted))
            plain, drafted = pairs[0]
            speeds = [statistics.median(p[i].speed for p in pairs) for i in (0, 1)]
            ratio = statistics.median(d.speed / p.speed for p, d in pairs)
            print(
                f"| {name} | {streams} | {speeds[0]:.0f} | {speeds[1]:.0f} | {ratio:.2f} | {plain.steps} "
                f"| {drafted.steps} | {drafted.accepted} of {drafted.drafted} |",
                flush=True,
            )
    model.close()


if __name__ == "__main__":
    main(sys.argv[1:])
