"""How far thinking runs past a time budget: thinking_time_ms - max_time_ms of triggered records."""

from __future__ import annotations

import statistics

from bench.serving import chat_all, settings, user
from kiln.cli.embedded import embedded_server

BUDGET_MS = 40
ROUNDS = 24


def main() -> None:
    print(f"time budget {BUDGET_MS} ms, 'Think forever.', {ROUNDS} requests a stream count")
    print("| streams | triggered | p50 overshoot ms | p99 ms | p50 engine step ms |")
    print("|---|---|---|---|---|")
    with embedded_server(settings()) as url:
        for streams in (1, 4, 16):
            body = user("Think forever.", max_tokens=400, temperature=0, thinking_budget_ms=BUDGET_MS)
            answers = chat_all(url, [body] * max(ROUNDS, streams * 4), concurrency=streams)
            records = [answer["metadata"]["thinking_budget"] for answer in answers]
            timed = [r for r in records if r.get("trigger") == "time"]
            late = sorted(r["thinking_time_ms"] - BUDGET_MS for r in timed)
            steps = [r["thinking_time_ms"] / max(1, r["thinking_tokens"]) for r in timed]
            p99 = late[min(len(late) - 1, int(len(late) * 0.99))]
            print(
                f"| {streams} | {len(timed)}/{len(records)} | {statistics.median(late):.0f} | {p99} "
                f"| {statistics.median(steps):.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
