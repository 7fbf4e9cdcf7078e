"""The standing workloads, against kiln alone or against a peer, interleaved.

    python -m bench standing                       # an embedded kiln with the bundled model
    KILN_BENCH_MODEL=model.gguf python -m bench standing
    KILN_BENCH_PEER=http://127.0.0.1:8081 KILN_BENCH_MODEL=model.gguf python -m bench standing

The peer must serve the same model file with the same threads, context and parallel setting;
docs/performance.md has its command, and scripts/build_peer.py builds it.
KILN_BENCH_ROUNDS (7) is the number of interleaved rounds, KILN_BENCH_ONLY a part of a workload's name,
KILN_BENCH_CELLS (8192) the size of the KV cache, which is `-c` on the peer's side, KILN_BENCH_CTX (4096)
the longest context of a request.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from bench.serving import settings
from kiln.cli.embedded import embedded_server
from kiln.core.errors import KilnError
from kiln.core.settings import Settings
from kiln.core.wording import counted
from kiln.loadgen.server import connect
from kiln.loadgen.standing import STANDING, Scenario, compare_scenario


def main() -> None:
    rounds = _number("KILN_BENCH_ROUNDS", 7)
    peer = os.environ.get("KILN_BENCH_PEER")
    wanted = os.environ.get("KILN_BENCH_ONLY", "")
    scenarios = [scenario for scenario in STANDING if wanted in scenario.name]
    if not scenarios:
        names = "; ".join(scenario.name for scenario in STANDING)
        sys.exit(f"KILN_BENCH_ONLY is {wanted!r}, a part of no workload's name; there are: {names}")
    with embedded_server(bench_settings()) as url:
        if peer is None:
            print("| workload | figure | median | range |\n|---|---|---|---|")
            for scenario in scenarios:
                print(_alone(scenario, url, rounds), flush=True)
        else:
            print(f"kiln / {peer}, medians of {counted(rounds, 'round')} each, in turn")
            print("| workload | figure | kiln | peer | ratio | range |\n|---|---|---|---|---|---|")
            for scenario in scenarios:
                print(_against(scenario, url, peer, rounds), flush=True)


def bench_settings() -> Settings:
    """16 sequences, two threads: the peer's flags in docs/performance.md are the same."""
    base = settings()
    engine = replace(
        base.engine,
        threads=2,
        kv_size=_number("KILN_BENCH_CELLS", 8192),
        ctx_size=_number("KILN_BENCH_CTX", 4096),
    )
    model = replace(base.model, path=os.environ.get("KILN_BENCH_MODEL"))
    return replace(base, engine=engine, model=model)


def _number(name: str, default: int) -> int:
    value = os.environ.get(name, str(default))
    if not (value.isascii() and value.isdigit() and int(value) >= 1):
        sys.exit(f"{name} is {value!r}: it must be a whole number, 1 or more")
    return int(value)


def _alone(scenario: Scenario, url: str, rounds: int) -> str:
    server = connect(url)
    values = []
    for seed in range(rounds):
        try:
            value = getattr(scenario.run(server, seed), scenario.figure)
        except KilnError as error:
            return f"| {scenario.name} | {scenario.figure} | not measured: {error.message} | |"
        if value is None:
            return f"| {scenario.name} | {scenario.figure} | not measured: nothing to measure it by | |"
        values.append(float(value))
    values.sort()
    middle = values[len(values) // 2]
    return f"| {scenario.name} | {scenario.figure} | {middle:.3g} | {values[0]:.3g}..{values[-1]:.3g} |"


def _against(scenario: Scenario, url: str, peer: str, rounds: int) -> str:
    try:
        spread, ours, theirs = compare_scenario(scenario, connect(url), connect(peer), rounds)
    except KilnError as error:
        return f"| {scenario.name} | {scenario.figure} | not measured: {error.message} | | | |"
    better = "higher" if scenario.higher_is_better else "lower"
    return (
        f"| {scenario.name} | {scenario.figure} ({better} is better) | {ours:.3g} | {theirs:.3g} "
        f"| {spread.median:.3f} | {spread.low:.3f}..{spread.high:.3f} |"
    )


if __name__ == "__main__":
    main()
