"""What the latency ledger costs a token: with and without the per-token timing events."""

from __future__ import annotations

import time

from kiln.chat.telemetry.latency import LatencyLedger
from kiln.core.tokens import Source, TokenEvent
from kiln.engine.ports import Delivery, StepTimes

TOKENS = 100_000


def main() -> None:
    print(f"microseconds a token over {TOKENS:,} tokens\n| ledger | a token |\n|---|---|")
    for name, measured in (("notes only", False), ("with token timing", True)):
        print(f"| {name} | {cost_us(measured):.1f} |")


def cost_us(measured: bool) -> float:
    now = time.monotonic()
    deliveries = [
        Delivery(
            [TokenEvent(i, Source.SAMPLED, -0.1, now + i * 0.01)],
            step=StepTimes(0.008, 0.0, 0.001, now + i * 0.01 + 0.0001),
        )
        for i in range(TOKENS)
    ]
    ledger = LatencyLedger(now, 0.001, measured=measured)
    started = time.perf_counter()
    for delivery in deliveries:
        ledger.received(delivery.tokens[0], delivery)
    return (time.perf_counter() - started) / TOKENS * 1e6


if __name__ == "__main__":
    main()
