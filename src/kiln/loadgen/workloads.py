"""The standing workloads: each puts one named load on a server and gives its few figures.

Every function takes a server and a `seed`. The same seed asks the same things, another seed other
ones, so that no call finds the prompts of an earlier one cached. To compare two servers, call a
function on each in turn with the same seeds (see standing.py). Output lengths are forced
with `ignore_eos`. A request that fails ends the scenario with a ConfigError.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kiln.core.errors import ConfigError
from kiln.loadgen.client.connection import Client
from kiln.loadgen.client.trace import Trace
from kiln.loadgen.distributions import Fixed
from kiln.loadgen.load import ClosedLoop, Until, measure
from kiln.loadgen.prompts import Prompt, PromptShape, encode_body, generate_prompts
from kiln.loadgen.quantiles import quantile
from kiln.loadgen.report import Report
from kiln.loadgen.server import CHAT, Server, answer_to, in_ms, known, need_all, with_client

LOOK_EVERY_S = 0.002


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """`tokens_per_s` is all output tokens over the time from the first start to the last end."""

    concurrency: int
    tokens_per_s: float
    window_tokens_per_s: float | None
    all_done_s: float
    ttft_ms_p50: float
    itl_ms_p50: float
    itl_ms_p99: float
    prompt_tokens: float | None
    cached_tokens: float | None
    budget_triggered: int = 0
    overshoot_tokens_max: float | None = None
    overshoot_ms_p50: float | None = None
    overshoot_ms_max: float | None = None


def streams(
    server: Server | str,
    concurrency: int,
    *,
    seed: int | str = 0,
    prompt_tokens: int = 32,
    output_tokens: int = 64,
    shared_prefix: int = 0,
    temperature: float | None = 0.0,
    **extra: Any,
) -> StreamFigures:
    """`concurrency` requests begun at once, each with a prompt of its own. `extra` are request fields."""
    server = known(server)
    shape = PromptShape(Fixed(prompt_tokens), Fixed(output_tokens), shared_prefix, server.tokens_per_word)
    options = server.options(temperature=temperature, **extra)
    # The name of the shape keeps the prompts of different workloads apart.
    prompts = generate_prompts(shape, f"{seed}:{concurrency}:{prompt_tokens}:{shared_prefix}")
    bodies = [encode_body(next(prompts), options) for _ in range(concurrency)]

    async def work(client: Client) -> Report:
        return await measure(client, bodies, ClosedLoop(concurrency), Until(requests=concurrency))

    report = with_client(server.target, work)
    need_all(report.traces, server)
    return _stream_figures(report, concurrency)


def shared_prefix(server: Server | str, *, seed: int = 0, requests: int = 16) -> StreamFigures:
    """Requests begun at once that share their first 1,024 tokens, not seen before; 64 tokens out each."""
    return streams(server, requests, seed=seed, prompt_tokens=32, output_tokens=64, shared_prefix=1024)


@dataclass(frozen=True, slots=True)
class SecondTurnFigures:
    first_turn_s: float
    second_ttft_ms: float
    prompt_tokens: int | None
    cached_tokens: int | None


def second_turn(
    server: Server | str, *, seed: int = 0, chat_tokens: int = 2048, output_tokens: int = 32
) -> SecondTurnFigures:
    """A chat whose first turn has `chat_tokens`; measured is the TTFT of a short second turn."""
    server = known(server)
    options = server.options()
    first = {"role": "user", "content": server.text(chat_tokens, f"chat:{seed}")}
    follow_up = {"role": "user", "content": server.text(16, f"follow-up:{seed}")}

    async def work(client: Client) -> SecondTurnFigures:
        began_s = time.perf_counter()
        answer = await answer_to(
            client, encode_body(Prompt((first,), None, output_tokens), options, stream=False)
        )
        first_s = time.perf_counter() - began_s
        said = {"role": "assistant", "content": answer["choices"][0]["message"].get("content") or ""}
        prompt = Prompt((first, said, follow_up), None, output_tokens)
        trace = await client.stream(CHAT, encode_body(prompt, options))
        need_all([trace], server)
        return SecondTurnFigures(first_s, in_ms(trace.ttft_s), trace.prompt_tokens, trace.cached_tokens)

    return with_client(server.target, work)


@dataclass(frozen=True, slots=True)
class LongPromptFigures:
    """Gaps of the decoders that overlap the time from sending the long prompt to its first token,
    and those before it. `decoders_lasted` is false when one ended in that time."""

    itl_ms_p99: float
    itl_ms_max: float
    quiet_itl_ms_p99: float
    long_ttft_ms: float
    decoders_lasted: bool


def long_prompt_among_decoders(
    server: Server | str,
    *,
    seed: int = 0,
    decoders: int = 8,
    prompt_tokens: int = 2048,
    decoder_tokens: int = 512,
    settle_tokens: int = 8,
) -> LongPromptFigures:
    """A long prompt arrives when all decoders have given `settle_tokens` or more tokens."""
    server = known(server)
    options = server.options()
    texts = [server.text(32, f"decoder:{seed}:{n}") for n in range(decoders)]
    long = Prompt(None, server.text(prompt_tokens, f"long:{seed}"), 4)

    async def work(client: Client) -> LongPromptFigures:
        traces = [Trace(started_s=0.0) for _ in texts]
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    client.stream(CHAT, encode_body(Prompt(None, text, decoder_tokens), options), trace)
                )
                for text, trace in zip(texts, traces, strict=True)
            ]
            while any(len(t.times_s) < settle_tokens and t.ended_s is None for t in traces):
                await asyncio.sleep(LOOK_EVERY_S)
            arrived = await client.stream(CHAT, encode_body(long, options))
            lasted = all(trace.ended_s is None for trace in traces)
            for task in tasks:
                task.cancel()
        need_all([arrived, *(trace for trace in traces if trace.failure is not None)], server)
        return _long_prompt_figures(arrived, traces, lasted)

    return with_client(server.target, work)


def _long_prompt_figures(arrived: Trace, decoders: Sequence[Trace], lasted: bool) -> LongPromptFigures:
    sent_s = arrived.started_s
    first_s = sent_s + in_ms(arrived.ttft_s) / 1000
    pairs = [pair for trace in decoders for pair in zip(trace.times_s, trace.times_s[1:], strict=False)]
    stalled = sorted((b - a) * 1000 for a, b in pairs if b > sent_s and a < first_s)
    quiet = sorted((b - a) * 1000 for a, b in pairs if b <= sent_s)
    if not stalled or not quiet:
        raise ConfigError("the decoders gave too few tokens around the long prompt to measure their gaps")
    return LongPromptFigures(
        quantile(stalled, 0.99), stalled[-1], quantile(quiet, 0.99), in_ms(arrived.ttft_s), lasted
    )


@dataclass(frozen=True, slots=True)
class ChoicesFigures:
    """Seconds to all answers, and their ratio: one request with `n` against `n` requests."""

    n: int
    together_s: float
    separate_s: float
    ratio: float


def many_choices(
    server: Server | str, *, seed: int = 0, n: int = 8, prompt_tokens: int = 1024, output_tokens: int = 32
) -> ChoicesFigures:
    """One request for `n` sampled choices, then `n` requests at once, all prompts new to the server."""
    server = known(server)
    texts = [server.text(prompt_tokens, f"choices:{seed}:{k}") for k in range(n + 1)]
    prompts = [Prompt(None, text, output_tokens) for text in texts]
    joint = encode_body(prompts[0], server.options(temperature=1.0, n=n), stream=False)
    single = [encode_body(prompt, server.options(temperature=1.0), stream=False) for prompt in prompts[1:]]

    async def work(client: Client) -> ChoicesFigures:
        began_s = time.perf_counter()
        answer = await answer_to(client, joint)
        together_s = time.perf_counter() - began_s
        if len(answer["choices"]) != n:
            raise ConfigError(f"asked for {n} choices, the server gave {len(answer['choices'])}")
        began_s = time.perf_counter()
        await asyncio.gather(*(answer_to(client, body) for body in single))
        separate_s = time.perf_counter() - began_s
        return ChoicesFigures(n, together_s, separate_s, together_s / separate_s)

    return with_client(server.target, work)


@dataclass(frozen=True, slots=True)
class BudgetFigures:
    """Tokens a second without a budget and with one too distant to bind, and what a binding one did."""

    off_tokens_per_s: float
    distant_tokens_per_s: float
    ratio: float
    binding: StreamFigures


def budgets(
    server: Server | str, *, seed: int = 0, concurrency: int = 4, output_tokens: int = 64, binding: int = 4
) -> BudgetFigures:
    """The cost of a thinking budget. The arms go first in turn with the seed's parity."""
    server = known(server)

    def arm(limit: int | None) -> StreamFigures:
        # Prompts of its own for each arm, so that none finds another's cached.
        return streams(
            server,
            concurrency,
            seed=f"{seed}:{limit}",
            output_tokens=output_tokens,
            thinking_budget_tokens=limit,
        )

    distant = 1_000_000
    order = (None, distant) if seed % 2 == 0 else (distant, None)
    rates = {limit: arm(limit).tokens_per_s for limit in order}
    return BudgetFigures(rates[None], rates[distant], rates[distant] / rates[None], arm(binding))


def time_budgets(
    server: Server | str,
    *,
    seed: int = 0,
    concurrency: int = 8,
    budget_ms: int = 5,
    output_tokens: int = 64,
) -> StreamFigures:
    """A time budget so short that it binds; the overshoot is the server's own measurement."""
    return streams(server, concurrency, seed=seed, output_tokens=output_tokens, thinking_budget_ms=budget_ms)


def _stream_figures(report: Report, concurrency: int) -> StreamFigures:
    if report.ttft_ms is None or report.itl_ms is None:
        raise ConfigError("the answers held too little text to be measured")
    budget = report.budgets
    return StreamFigures(
        concurrency=concurrency,
        tokens_per_s=report.tokens_per_s,
        window_tokens_per_s=report.window_tokens_per_s,
        all_done_s=report.span_s,
        ttft_ms_p50=report.ttft_ms.p50,
        itl_ms_p50=report.itl_ms.p50,
        itl_ms_p99=report.itl_ms.p99,
        prompt_tokens=report.prompt_tokens.mean if report.prompt_tokens else None,
        cached_tokens=report.cached_tokens.mean if report.cached_tokens else None,
        budget_triggered=sum(budget.triggered.values()) if budget else 0,
        overshoot_tokens_max=budget.overshoot_tokens.max if budget and budget.overshoot_tokens else None,
        overshoot_ms_p50=budget.overshoot_ms.p50 if budget and budget.overshoot_ms else None,
        overshoot_ms_max=budget.overshoot_ms.max if budget and budget.overshoot_ms else None,
    )
