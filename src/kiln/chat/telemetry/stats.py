"""Statistics held in memory: a ring of recent requests, and the token gaps of the last minute.

No prompt and no answer text is kept.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from math import inf
from typing import Any

import msgspec
import numpy as np

from kiln.chat.telemetry.observe import ChoiceReport
from kiln.core.budgets import Budget
from kiln.core.completion import ExchangeHead
from kiln.core.errors import KilnError
from kiln.core.latency import Latency
from kiln.thinking.records import to_recent_record

RECENT_REQUESTS = 256
# What an entry tells of its latency, in milliseconds, beside the number of stalls.
LATENCIES = (
    "ttft_ms",
    "total_ms",
    "queue_ms",
    "admission_ms",
    "prefill_ms",
    "decode_ms",
    "itl_ms_p50",
    "itl_ms_p99",
)
WINDOW_S = 60.0
WINDOW_GAPS = 65536


class Statistics:
    """Implements `Observer`. Bounded: 256 completions and 65,536 gaps."""

    def __init__(self) -> None:
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT_REQUESTS)
        # Gaps of a choice in seconds, and the `time.monotonic()` at which the last of them ended.
        self._gaps: deque[tuple[array[float], float]] = deque()
        self._gap_count = 0
        self._dropped_until = -inf

    def exchange_started(self, head: ExchangeHead) -> None:
        pass

    def token_gaps(self, gaps: array[float], ended: float) -> None:
        self._gaps.append((gaps, ended))
        self._gap_count += len(gaps)
        while self._gap_count > WINDOW_GAPS:
            self._dropped_until = max(self._dropped_until, self._gaps[0][1])
            self._drop()

    def choice_ended(self, head: ExchangeHead, report: ChoiceReport) -> None:
        entry: dict[str, Any] = {
            "id": head.id,
            "created": head.created,
            "model": head.model,
            "index": report.index,
            "finish_reason": report.reason,
            "prompt_tokens": head.prompt_tokens,
            "cached_tokens": report.cached_tokens,
            "completion_tokens": report.completion_tokens,
            "thinking_budget": msgspec.to_builtins(
                to_recent_record(head.budget, applied=head.budget_applied, outcome=report.outcome)
            ),
        }
        if report.error_code is not None:
            entry["error"] = report.error_code
        entry["latency"] = _summary(report.latency)
        self._recent.append(entry)

    def turn_refused(self, budget: Budget, error: KilnError) -> None:
        self._recent.append(
            {
                "created": int(time.time()),
                "finish_reason": "error",
                "error": error.code,
                "thinking_budget": msgspec.to_builtins(to_recent_record(budget, applied=None, outcome=None)),
            }
        )

    def recent_requests(self) -> list[dict[str, Any]]:
        """The last completions, newest first."""
        return list(reversed(self._recent))

    def decode_window(self) -> dict[str, Any]:
        """Inter-token latency of the last 60 seconds; percentiles R-7, null without a gap."""
        since = time.monotonic() - WINDOW_S
        while self._gaps and self._gaps[0][1] < since:
            self._drop()
        # What a slow reader's choice or one that stalled had to tell came late, behind later gaps.
        gaps = np.array([gap for part, ended in self._gaps if ended >= since for gap in part]) * 1000
        quantiles = np.quantile(gaps, (0.5, 0.9, 0.99)) if len(gaps) else (None, None, None)
        p50, p90, p99 = (None if q is None else float(q) for q in quantiles)
        return {
            "window_s": WINDOW_S,
            "gaps": len(gaps),
            "truncated": self._dropped_until >= since,
            "itl_ms_p50": p50,
            "itl_ms_p90": p90,
            "itl_ms_p99": p99,
            "max_itl_ms": float(gaps.max()) if len(gaps) else None,
        }

    def _drop(self) -> None:
        self._gap_count -= len(self._gaps.popleft()[0])


def _summary(latency: Latency) -> dict[str, Any]:
    summary = {name: getattr(latency, name) for name in LATENCIES}
    return {**summary, "stall_count": latency.stall_count}
