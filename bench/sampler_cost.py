"""The sampler's share of a decode step: 16 rows of logits, vocabularies of 49k and 152k.

The logits are a peaked distribution over a noise floor, as a language model's are. The step it is
compared with is the fastest decode step of a model with that vocabulary on this kind of machine.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from kiln.core.sampling import SamplingParams
from kiln.engine.ports import GenerationRequest
from kiln.engine.sampling.sampler import SequenceSampler

ROWS = 16
REPEATS = 40
POLICIES = {
    "greedy": SamplingParams(temperature=0.0),
    "default (top-k 20, top-p 0.95)": SamplingParams(),
    "top-p 0.95 alone": SamplingParams(top_k=0),
    "untruncated": SamplingParams(top_k=0, top_p=1.0),
    "min-p 0.05": SamplingParams(top_k=0, top_p=1.0, min_p=0.05),
    "penalties, default": SamplingParams(presence_penalty=0.5, repetition_penalty=1.1),
}


def main() -> None:
    print(f"{ROWS} rows, median of {REPEATS} steps, milliseconds a step")
    print("| policy | 49,152 | 151,936 |\n|---|---|---|")
    for name, params in POLICIES.items():
        costs = [step_ms(params, size) for size in (49_152, 151_936)]
        print(f"| {name} | {costs[0]:.2f} | {costs[1]:.2f} |", flush=True)


def step_ms(params: SamplingParams, vocabulary: int) -> float:
    generator = np.random.default_rng(7)
    logits = generator.normal(0, 2, (ROWS, vocabulary)).astype(np.float32)
    for row in logits:
        row[generator.integers(0, vocabulary, 40)] += generator.gamma(4, 3, 40).astype(np.float32)
    prompt = generator.integers(0, vocabulary, 400).tolist()
    samplers = [SequenceSampler(GenerationRequest(prompt, 1, params, seed=row)) for row in range(ROWS)]
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for sampler, row in zip(samplers, logits, strict=True):
            sampler.record(sampler.pick(row)[0])
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1000


if __name__ == "__main__":
    main()
