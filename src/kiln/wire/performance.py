"""Performance metadata of the Kiln contract (seed 000): request phases, stalls, one token's timing.

Every field is written; null means that this serving path did not measure it, 0 that it took no time.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from kiln.wire.common import FinishReasonName, Milliseconds, NonNegative, NonNegativeNumber, Uint32

MAX_RETAINED_GAPS = 8192

PhaseName = Literal[
    "actor_queue",
    "actor_admission",
    "actor_prefill",
    "actor_decode",
    "actor_cycle_idle",
    "response_delivery",
    "handler_queue",
    "client_delivery",
    "sampling",
    "readback",
    "gpu_lock_wait",
    "graph_capture",
    "graph_replay",
    "synchronization",
    "resize",
    "trim",
    "adapter",
    "training",
    "unexplained",
]


class LatencyPhaseTimings(Struct, kw_only=True, forbid_unknown_fields=True):
    """Milliseconds of one request spent in each phase."""

    actor_queue_ms: Milliseconds | None
    actor_admission_ms: Milliseconds | None
    tokenization_ms: Milliseconds | None
    prefill_ms: Milliseconds | None
    decode_ms: Milliseconds | None
    actor_cycle_idle_ms: Milliseconds | None
    sampling_ms: Milliseconds | None
    readback_ms: Milliseconds | None
    response_delivery_ms: Milliseconds | None
    handler_queue_ms: Milliseconds | None
    client_delivery_ms: Milliseconds | None
    gpu_lock_wait_ms: Milliseconds | None
    graph_capture_ms: Milliseconds | None
    graph_replay_ms: Milliseconds | None
    synchronization_ms: Milliseconds | None
    resize_ms: Milliseconds | None
    trim_ms: Milliseconds | None
    adapter_ms: Milliseconds | None
    training_ms: Milliseconds | None
    unexplained_ms: Milliseconds | None


class LatencyStallReasonCounts(Struct, kw_only=True, forbid_unknown_fields=True):
    """Stalls of one request by the phase that explains most of each. Names are those of PhaseName."""

    actor_queue: NonNegative
    actor_admission: NonNegative
    actor_prefill: NonNegative
    actor_decode: NonNegative
    actor_cycle_idle: NonNegative
    response_delivery: NonNegative
    handler_queue: NonNegative
    client_delivery: NonNegative
    sampling: NonNegative
    readback: NonNegative
    gpu_lock_wait: NonNegative
    graph_capture: NonNegative
    graph_replay: NonNegative
    synchronization: NonNegative
    resize: NonNegative
    trim: NonNegative
    adapter: NonNegative
    training: NonNegative
    unexplained: NonNegative


class RequestLatencyDiagnostics(Struct, kw_only=True, forbid_unknown_fields=True):
    """Gaps between the tokens of one request, their percentiles, stalls and phases; milliseconds."""

    emitted_tokens: NonNegative
    gap_samples: NonNegative
    retained_gap_samples: Annotated[int, Meta(ge=0, le=MAX_RETAINED_GAPS)]
    gap_samples_truncated: bool
    ttft_ms: Milliseconds | None
    itl_ms_p50: Milliseconds | None
    itl_ms_p99: Milliseconds | None
    itl_ms_p999: Milliseconds | None
    max_itl_ms: Milliseconds | None
    stall_threshold_ms: Milliseconds | None
    stall_count: NonNegative
    unexplained_stall_count: NonNegative
    stall_reasons: LatencyStallReasonCounts
    phases: LatencyPhaseTimings


class ChatCompletionPerformanceMetadata(Struct, kw_only=True, forbid_unknown_fields=True):
    prompt_tokens: NonNegative
    completion_tokens: NonNegative
    ttft_ms: Milliseconds | None
    prefill_ms: Milliseconds | None
    actor_queue_ms: Milliseconds | None
    actor_admission_ms: Milliseconds | None
    actor_prefill_wall_ms: Milliseconds | None
    resident_prefill_used: bool | None
    decode_ms: Milliseconds | None
    total_latency_ms: Milliseconds
    decode_tokens_per_sec: NonNegativeNumber | None
    adapter_used: str
    thinking_mode: str
    finish_reason: FinishReasonName
    latency: RequestLatencyDiagnostics | None


class StreamingTokenTiming(Struct, kw_only=True, forbid_unknown_fields=True):
    """One streamed token's way, in milliseconds since the request began; a stream event of its own."""

    object: Literal["kiln.token_timing"] = "kiln.token_timing"
    source: Literal["batching_engine", "direct"]
    token_index: Uint32
    token_id: Uint32
    ready_ms: Milliseconds
    producer_delivered_ms: Milliseconds
    handler_received_ms: Milliseconds
    body_enqueued_ms: Milliseconds
    response_delivery_ms: Milliseconds
    handler_queue_ms: Milliseconds
    queue_delay_ms: Milliseconds
    client_delivery_ms: Milliseconds
    blocking_phase: PhaseName | None
    blocking_phase_ms: Milliseconds | None
