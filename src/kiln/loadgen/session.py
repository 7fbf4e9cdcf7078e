"""A whole benchmark: warm-up and levels of load on one server, or rounds on two in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from kiln.loadgen.client.connection import Client
from kiln.loadgen.client.target import ROUTES, Target, explain
from kiln.loadgen.client.trace import Trace
from kiln.loadgen.compare import Comparison, turns
from kiln.loadgen.load import ClosedLoop, Load, Poisson, Until, measure, unless_stopped
from kiln.loadgen.prompts import (
    BodyOptions,
    Prompt,
    PromptShape,
    encode_body,
    generate_prompts,
    recorded_prompts,
)
from kiln.loadgen.report import Limits, Report
from kiln.loadgen.setup import find_model, tokens_per_word, warm_up

REQUESTS_A_STREAM = 8
LEAST_REQUESTS = 16
OnTrace = Callable[[str, Trace], None]


def ignore(_load: str, _trace: Trace) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured, on whichever server. `options.model` is each target's own affair."""

    loads: tuple[Load, ...]
    until: Until
    warmup: int = 1
    shape: PromptShape = PromptShape()
    dataset: tuple[Prompt, ...] | None = None
    options: BodyOptions = field(default_factory=BodyOptions)
    limits: Limits | None = None
    seed: int = 0

    def until_of(self, load: Load) -> Until:
        """The end of a load: the plan's, else a number of requests that fits the load."""
        if self.until.requests is not None or self.until.duration_s is not None:
            return self.until
        width = load.concurrency if isinstance(load, ClosedLoop) else round(load.rate_per_s)
        return Until(requests=max(LEAST_REQUESTS, REQUESTS_A_STREAM * width))

    def bodies(self, options: BodyOptions, words: float, seed: str) -> Iterator[bytes]:
        """Request bodies without end. Equal seeds give equal prompts."""
        shape = replace(self.shape, tokens_per_word=words)
        if self.dataset is None:
            prompts = generate_prompts(shape, seed)
        else:
            prompts = recorded_prompts(self.dataset, shape, seed)
        return (encode_body(prompt, options) for prompt in prompts)


@dataclass
class _Side:
    """One server of a benchmark, ready for requests."""

    client: Client
    options: BodyOptions
    label: str


class Session:
    """Runs a plan. `stop` ends it early; `on_trace` hears of each request that ended."""

    def __init__(
        self, plan: Plan, stop: asyncio.Event, on_trace: OnTrace = lambda _load, _trace: None
    ) -> None:
        self._plan = plan
        self._stop = stop
        self._on_trace = on_trace
        self._words = 1.0

    async def run_one(self, target: Target) -> list[Report]:
        """A report for each load of the plan; fewer if stopped. Raises ConfigError if nothing succeeds."""
        client = Client(target)
        try:
            side = await self._prepare(client, target.url)
            await self._calibrate(side)
            reports: list[Report] = []
            for n, load in enumerate(self._plan.loads):
                await self._warm_up(side, load, n)
                if self._stop.is_set() and reports:
                    break
                reports.append(await self._measure(side, load, f"{n}"))
            return reports
        finally:
            client.close()

    async def compare(
        self, target_a: Target, target_b: Target, rounds: int
    ) -> list[tuple[Comparison, list[Report]]]:
        """For each load the full rounds, and, if stopped, the report of a round that was not finished."""
        clients = [Client(target_a), Client(target_b)]
        try:
            sides = {
                name: await self._prepare(client, f"{name} {client.target.url}")
                for name, client in zip("AB", clients, strict=True)
            }
            await self._calibrate(sides["A"])  # once, so that both get the very same prompts
            results = []
            for n, load in enumerate(self._plan.loads):
                for side in sides.values():
                    await self._warm_up(side, load, n)
                results.append(await self._rounds(sides, load, n, rounds))
                if self._stop.is_set():
                    break
            return results
        finally:
            for client in clients:
                client.close()

    async def _rounds(
        self, sides: dict[str, _Side], load: Load, level: int, rounds: int
    ) -> tuple[Comparison, list[Report]]:
        done: dict[str, list[Report]] = {"A": [], "B": []}
        for n, name in turns(rounds):
            if self._stop.is_set():
                break
            done[name].append(await self._measure(sides[name], load, f"{level}:{n}"))
        full = min(len(done["A"]), len(done["B"]))
        last = [reports[-1] for reports in done.values() if reports]
        if any(report.interrupted for report in last):
            full = min(sum(not r.interrupted for r in reports) for reports in done.values())
        rest = done["A"][full:] + done["B"][full:]
        return Comparison(list(zip(done["A"][:full], done["B"][:full], strict=True))), rest

    async def _prepare(self, client: Client, label: str) -> _Side:
        model = client.target.model or await unless_stopped(find_model(client), self._stop)
        return _Side(client, replace(self._plan.options, model=model), label)

    async def _calibrate(self, side: _Side) -> None:
        if self._plan.dataset is None and not self._stop.is_set():
            asking = tokens_per_word(side.client, side.options, self._plan.seed)
            self._words = await unless_stopped(asking, self._stop) or 1.0

    async def _warm_up(self, side: _Side, load: Load, level: int) -> None:
        plan = self._plan
        if plan.warmup and not self._stop.is_set():
            bodies = plan.bodies(side.options, self._words, f"{plan.seed}:warm-up:{level}")
            width = load.concurrency if isinstance(load, ClosedLoop) else plan.warmup
            await warm_up(side.client, bodies, plan.warmup, width, plan.options.endpoint, self._stop)

    async def _measure(self, side: _Side, load: Load, seed: str) -> Report:
        plan = self._plan
        seed = f"{plan.seed}:{seed}"
        if isinstance(load, Poisson):
            load = replace(load, seed=seed)
        report = await measure(
            side.client,
            plan.bodies(side.options, self._words, seed),
            load,
            plan.until_of(load),
            endpoint=plan.options.endpoint,
            limits=plan.limits,
            label=side.label,
            stop=self._stop,
            on_trace=lambda trace: self._on_trace(f"{side.label}, {load}", trace),
        )
        failure = next((trace.failure for trace in report.traces if trace.failure is not None), None)
        if failure is not None and report.succeeded == 0:
            raise explain(failure, side.client.target, ROUTES[plan.options.endpoint])
        return report
