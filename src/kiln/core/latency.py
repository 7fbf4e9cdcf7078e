"""Measured latencies of one completion, as values. Milliseconds; None means not measured on this path."""

from __future__ import annotations

from dataclasses import dataclass

STALL_CAUSES = (
    "actor_prefill",
    "actor_decode",
    "sampling",
    "response_delivery",
    "handler_queue",
    "client_delivery",
    "unexplained",
)


@dataclass(frozen=True, slots=True)
class TokenTiming:
    """One streamed token's way; every mark is relative to the request's start.

    `cause` is what held it up the longest since the token before, with `cause_ms`; both None for the
    first token.
    """

    token_index: int
    token_id: int
    ready_ms: float
    delivered_ms: float
    received_ms: float
    enqueued_ms: float
    cause: str | None
    cause_ms: float | None


@dataclass(frozen=True, slots=True)
class Latency:
    """The account of one completion. Percentiles are R-7 over at most 8,192 retained gaps."""

    emitted_tokens: int
    gap_samples: int
    retained_gap_samples: int
    ttft_ms: float | None
    itl_ms_p50: float | None
    itl_ms_p99: float | None
    itl_ms_p999: float | None
    max_itl_ms: float | None
    stall_threshold_ms: float | None
    stall_reasons: dict[str, int]
    total_ms: float
    tokenization_ms: float | None
    queue_ms: float | None
    admission_ms: float | None
    prefill_ms: float | None
    prefill_wall_ms: float | None
    decode_ms: float | None
    sampling_ms: float | None
    adapter_ms: float | None
    response_delivery_ms: float | None
    handler_queue_ms: float | None
    client_delivery_ms: float | None
    unexplained_ms: float | None

    @property
    def stall_count(self) -> int:
        return sum(self.stall_reasons.values())
