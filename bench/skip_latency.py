"""How soon a skip takes effect: decode steps and milliseconds from the wish, which the 202 acknowledges, to
the closing tag and to the first token of the answer.

Counted where the tokens arrive, in the server's process, so that a step is a step: each delivery of a
generation is one, however many tokens a draft brought. KILN_BENCH_MODEL names a larger model.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.serving import settings
from kiln.chat.service import ChatService
from kiln.cli.assembly import create_app
from kiln.core.messages import Conversation, Message
from kiln.core.sampling import SamplingOverrides
from kiln.core.turn import ChatTurn

SKIPS = 96
AFTER = 10  # steps of thinking before the skip


@dataclass(frozen=True, slots=True)
class Skip:
    """Steps to the closing tag and to the first answer token, and seconds to the latter."""

    to_close: int
    to_answer: int
    seconds: float
    step_s: float


async def skip_one(service: ChatService) -> Skip:
    """One generation that thinks until it is skipped."""
    turn = ChatTurn(
        Conversation((Message("user", "Think forever."),)),
        sampling=SamplingOverrides(temperature=0.0),
        max_tokens=200,
    )
    prepared = await service.in_worker(lambda: service.prepare(turn))
    close = prepared.close_ids[-1]
    generation = service.engine.submit(prepared.requests[0])
    arrivals: list[float] = []
    asked: float | None = None
    steps = to_close = 0
    async for delivery in generation:
        if not delivery.tokens:
            continue
        now = time.perf_counter()
        arrivals.append(now)
        steps += asked is not None
        for token in delivery.tokens:
            if asked is not None and to_close:
                generation.cancel()
                gaps = [b - a for a, b in zip(arrivals, arrivals[1:], strict=False)]
                return Skip(to_close, steps, now - asked, statistics.median(gaps))
            if asked is not None and token.token_id == close:
                to_close = steps
        if len(arrivals) == AFTER:
            generation.close_thinking()
            asked = now
    raise AssertionError("the thinking was not closed")


def row(streams: int, skips: Sequence[Skip]) -> str:
    milliseconds = sorted(skip.seconds * 1000 for skip in skips)
    p99 = milliseconds[min(len(milliseconds) - 1, int(len(milliseconds) * 0.99))]
    closes, answers = [skip.to_close for skip in skips], [skip.to_answer for skip in skips]
    return (
        f"| {streams} | {len(skips)} | {statistics.median(closes):g} / {max(closes)}"
        f" | {statistics.median(answers):g} / {max(answers)}"
        f" | {statistics.median(milliseconds):.1f} / {p99:.1f}"
        f" | {statistics.median(skip.step_s for skip in skips) * 1000:.1f} |"
    )


async def measure() -> None:
    configured = settings()
    path = os.environ.get("KILN_BENCH_MODEL")
    if path:
        configured = replace(configured, model=replace(configured.model, path=path))
    app = create_app(configured)
    print("| streams | skips | steps to the close p50 / max | to the answer | ms p50 / p99 | step ms |")
    print("|---|---|---|---|---|---|")
    async with app.router.lifespan_context(app):
        service = app.state.kiln.service
        for streams in (1, 4, 16):
            skips: list[Skip] = []
            while len(skips) < SKIPS:
                skips += await asyncio.gather(*(skip_one(service) for _ in range(streams)))
            print(row(streams, skips), flush=True)


def main() -> None:
    asyncio.run(measure())


if __name__ == "__main__":
    main()
