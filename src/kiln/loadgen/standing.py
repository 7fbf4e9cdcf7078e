"""The list of standing workloads, each with the figure that two servers are compared by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kiln.core.errors import ConfigError
from kiln.core.wording import counted
from kiln.loadgen.compare import compare_figures
from kiln.loadgen.quantiles import Spread
from kiln.loadgen.server import Server
from kiln.loadgen.workloads import (
    StreamFigures,
    budgets,
    long_prompt_among_decoders,
    many_choices,
    second_turn,
    shared_prefix,
    streams,
    time_budgets,
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A standing workload and the figure by which two servers are compared."""

    name: str
    run: Callable[[Server, int], Any]
    figure: str
    higher_is_better: bool


def _streams(count: int, temperature: float) -> Scenario:
    name = f"{counted(count, 'stream')}, {'sampled' if temperature else 'greedy'}"
    run = partial(_run_streams, count=count, temperature=temperature)
    return Scenario(name, run, "tokens_per_s", True)


def _run_streams(server: Server, seed: int, *, count: int, temperature: float) -> StreamFigures:
    return streams(server, count, seed=f"{seed}:{temperature}", temperature=temperature)


STANDING = (
    _streams(1, 0.0),
    _streams(4, 0.0),
    _streams(16, 0.0),
    _streams(1, 1.0),
    _streams(4, 1.0),
    _streams(16, 1.0),
    Scenario("shared 1k prefix", lambda s, seed: shared_prefix(s, seed=seed), "all_done_s", False),
    Scenario("second turn", lambda s, seed: second_turn(s, seed=seed), "second_ttft_ms", False),
    Scenario(
        "long prompt among 8 decoders",
        lambda s, seed: long_prompt_among_decoders(s, seed=seed),
        "itl_ms_p99",
        False,
    ),
    Scenario("8 choices", lambda s, seed: many_choices(s, seed=seed), "ratio", False),
    Scenario("budgets", lambda s, seed: budgets(s, seed=seed), "ratio", True),
    Scenario("time budgets", lambda s, seed: time_budgets(s, seed=seed), "overshoot_ms_max", False),
)


def compare_scenario(scenario: Scenario, a: Server, b: Server, rounds: int) -> tuple[Spread, float, float]:
    """Ratios A/B of the scenario's figure over alternating rounds, and both sides' medians."""

    def figure_of(server: Server, seed: int) -> float:
        value = getattr(scenario.run(server, seed), scenario.figure)
        if value is None:
            raise ConfigError(f"{server.target.url} gave nothing to measure {scenario.figure} by")
        return float(value)

    return compare_figures(lambda n: figure_of(a, n), lambda n: figure_of(b, n), rounds)
