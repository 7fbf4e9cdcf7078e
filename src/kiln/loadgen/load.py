"""Putting load on a server: closed loops and Poisson arrivals, until a count, a time, or a stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kiln.core.wording import counted
from kiln.loadgen.client.connection import Client
from kiln.loadgen.client.target import ROUTES, Target
from kiln.loadgen.client.trace import Trace
from kiln.loadgen.distributions import poisson_arrivals
from kiln.loadgen.quantiles import summarize
from kiln.loadgen.report import ClientCost, Limits, Report, build_report

T = TypeVar("T")

# A load whose first requests all fail is given up; the least number of them.
GIVE_UP_AFTER = 8
TIMER_S = 0.02


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` requests are under way at any time; each one's end begins the next."""

    concurrency: int

    def __str__(self) -> str:
        return counted(self.concurrency, "stream")


@dataclass(frozen=True, slots=True)
class Poisson:
    """Requests arrive at random at a mean rate, whether or not earlier ones have ended."""

    rate_per_s: float
    seed: int | str = 0

    def __str__(self) -> str:
        return f"{self.rate_per_s:g} requests/s"


Load = ClosedLoop | Poisson


@dataclass(frozen=True, slots=True)
class Until:
    """When no more requests are begun; those under way end by themselves. At least one must be set."""

    requests: int | None = None
    duration_s: float | None = None


class _Gate:
    """Hands out request bodies until the load is over."""

    def __init__(self, bodies: Iterator[bytes], until: Until, give_up_after: int) -> None:
        self._bodies = bodies
        self._left = until.requests
        self._ends_s = None if until.duration_s is None else time.perf_counter() + until.duration_s
        self._give_up_after = give_up_after
        self._failed = 0
        self._succeeded = False

    def next(self) -> bytes | None:
        late = self._ends_s is not None and time.perf_counter() >= self._ends_s
        hopeless = not self._succeeded and self._failed >= self._give_up_after
        if self._left == 0 or late or hopeless:
            return None
        if self._left is not None:
            self._left -= 1
        return next(self._bodies, None)

    def judge(self, trace: Trace) -> None:
        self._succeeded = self._succeeded or trace.ok
        self._failed += not trace.ok


async def generate_load(
    client: Client,
    bodies: Iterable[bytes],
    load: Load,
    until: Until,
    *,
    endpoint: str = "chat",
    stop: asyncio.Event | None = None,
    on_trace: Callable[[Trace], None] | None = None,
) -> tuple[list[Trace], ClientCost]:
    """Run one load. The traces are those of the requests that ended, in the order of their ends;
    a `stop` cuts the others off."""
    if until.requests is None and until.duration_s is None:
        raise ValueError("a load needs an end: a number of requests or a duration")
    width = load.concurrency if isinstance(load, ClosedLoop) else 1
    gate = _Gate(iter(bodies), until, max(GIVE_UP_AFTER, width))
    traces: list[Trace] = []
    late_s = [0.0]

    async def one(body: bytes) -> None:
        trace = await client.stream(ROUTES[endpoint], body)
        traces.append(trace)
        gate.judge(trace)
        if on_trace is not None:
            on_trace(trace)

    cpu_s, wall_s = time.thread_time(), time.perf_counter()
    if isinstance(load, ClosedLoop):
        work = _closed(gate, one, load.concurrency)
    else:
        work = _open(gate, one, load, late_s)
    late_timer_s: list[float] = []
    timer = asyncio.ensure_future(_time_the_loop(late_timer_s))
    try:
        await unless_stopped(work, stop)
    finally:
        timer.cancel()
    late_timer = summarize(late_timer_s)
    cost = ClientCost(
        cpu_s=time.thread_time() - cpu_s,
        wall_s=time.perf_counter() - wall_s,
        chunks=sum(len(trace.times_s) for trace in traces),
        late_dispatch_ms=late_s[0] * 1000,
        late_timer_ms_p99=None if late_timer is None else late_timer.p99 * 1000,
    )
    return traces, cost


async def _closed(gate: _Gate, one: Callable[[bytes], Coroutine[Any, Any, None]], concurrency: int) -> None:
    async def worker() -> None:
        while (body := gate.next()) is not None:
            await one(body)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())


async def _open(
    gate: _Gate, one: Callable[[bytes], Coroutine[Any, Any, None]], load: Poisson, late_s: list[float]
) -> None:
    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for arrival_s in poisson_arrivals(load.rate_per_s, load.seed):
            await asyncio.sleep(max(0.0, began_s + arrival_s - time.perf_counter()))
            if (body := gate.next()) is None:
                return
            late_s[0] = max(late_s[0], time.perf_counter() - began_s - arrival_s)
            group.create_task(one(body))


async def _time_the_loop(late_s: list[float]) -> None:
    """Note how late the loop comes to a timer, again and again: so late it also comes to arriving text."""
    while True:
        due_s = time.perf_counter() + TIMER_S
        await asyncio.sleep(TIMER_S)
        late_s.append(max(0.0, time.perf_counter() - due_s))


async def unless_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event | None) -> T | None:
    """The result of the work, or None where `stop` cut it off.

    Where several parts of it fail together, the first one's error is raised and not a group.
    """
    task = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future((asyncio.Event() if stop is None else stop).wait())
    try:
        await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for pending in (task, stopping):
            pending.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)
    if task.cancelled():
        return None
    error = task.exception()
    if isinstance(error, BaseExceptionGroup):
        raise error.exceptions[0]
    return task.result()


def full_window(traces: Sequence[Trace], load: Load) -> tuple[float, float] | None:
    """When all of the load was on, as times of the traces' clock; None if it never was.

    Closed loop: from the moment at which `concurrency` requests were first under way to the last
    moment at which they were. Poisson: from the first to the last arrival. A request that the server
    refused was never under way.
    """
    if isinstance(load, Poisson):
        starts = [trace.started_s for trace in traces]
        return (min(starts), max(starts)) if len(starts) > 1 else None
    # At one instant the ends come first: a request that follows another does not add to it.
    begun = [trace for trace in traces if not _refused(trace)]
    changes = sorted(
        [(trace.started_s, 1) for trace in begun]
        + [(trace.ended_s, -1) for trace in begun if trace.ended_s is not None]
    )
    begin = end = None
    under_way = 0
    for time_s, change in changes:
        if change < 0 and under_way == load.concurrency:
            end = time_s
        under_way += change
        if begin is None and under_way == load.concurrency:
            begin = time_s
    return (begin, end) if begin is not None and end is not None else None


def _refused(trace: Trace) -> bool:
    """No connection, or the status of an error: the server did not begin to answer."""
    return trace.failure is not None and trace.failure.kind.startswith(("connect", "http_"))


async def measure(
    client: Client,
    bodies: Iterable[bytes],
    load: Load,
    until: Until,
    *,
    endpoint: str = "chat",
    limits: Limits | None = None,
    label: str | None = None,
    stop: asyncio.Event | None = None,
    on_trace: Callable[[Trace], None] | None = None,
) -> Report:
    """Run one load and report on it."""
    traces, cost = await generate_load(
        client, bodies, load, until, endpoint=endpoint, stop=stop, on_trace=on_trace
    )
    return build_report(
        traces,
        full_window(traces, load),
        cost,
        label=client.target.url if label is None else label,
        load=str(load),
        limits=limits,
        interrupted=stop is not None and stop.is_set(),
    )


def run_load(
    target: Target,
    bodies: Iterable[bytes],
    load: Load,
    until: Until,
    *,
    endpoint: str = "chat",
    limits: Limits | None = None,
    label: str | None = None,
) -> Report:
    """`measure` for callers without an event loop."""

    async def work() -> Report:
        client = Client(target)
        try:
            return await measure(client, bodies, load, until, endpoint=endpoint, limits=limits, label=label)
        finally:
            client.close()

    return run(work())


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a loop of its own; uvloop's where it is installed, for its smaller cost a read."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)
