"""`make bench`: run the standing workloads and print their tables. ARGS="name ..." picks some."""

from __future__ import annotations

import sys
from collections.abc import Callable

from bench import (
    budget_cost,
    event_path,
    grammar_cost,
    ledger_cost,
    memory,
    overshoot,
    sampler_cost,
    scoring_memory,
    skip_latency,
    standing,
)

WORKLOADS: dict[str, Callable[[], None]] = {
    "budget-cost": budget_cost.main,
    "overshoot": overshoot.main,
    "grammar-cost": grammar_cost.main,
    "sampler-cost": sampler_cost.main,
    "event-path": event_path.main,
    "ledger-cost": ledger_cost.main,
    "memory": memory.main,
    "scoring-memory": scoring_memory.main,
    "skip-latency": skip_latency.main,
    "standing": standing.main,
}


def main() -> None:
    names = sys.argv[1:] or list(WORKLOADS)
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        sys.exit(f"no workload {', '.join(unknown)}; there are: {', '.join(WORKLOADS)}")
    for name in names:
        print(f"\n## {name}", flush=True)
        WORKLOADS[name]()


if __name__ == "__main__":
    main()
