"""Performance metadata of the `/v1` dialect. Null says: not measured by this engine."""

from __future__ import annotations

from kiln.core.completion import ChoiceEnd, ExchangeHead
from kiln.core.latency import Latency, TokenTiming
from kiln.core.tokens import FinishReason
from kiln.wire import kiln as wire
from kiln.wire.kiln import FinishReasonName


def finish_reason_name(reason: FinishReason) -> FinishReasonName:
    """The contract's name of a finish reason."""
    names: dict[FinishReason, FinishReasonName] = {
        FinishReason.STOP: "stop",
        FinishReason.LENGTH: "length",
        FinishReason.TOOL_CALLS: "tool_calls",
    }
    return names.get(reason, "error")


def to_performance(head: ExchangeHead, choice: ChoiceEnd) -> wire.ChatCompletionPerformanceMetadata:
    """The metadata of one choice."""
    latency = choice.latency
    assert latency is not None
    decode_ms = latency.decode_ms
    rate = choice.completion_tokens / decode_ms * 1000 if decode_ms else None
    return wire.ChatCompletionPerformanceMetadata(
        prompt_tokens=head.prompt_tokens,
        completion_tokens=choice.completion_tokens,
        ttft_ms=latency.ttft_ms,
        prefill_ms=latency.prefill_ms,
        actor_queue_ms=latency.queue_ms,
        actor_admission_ms=latency.admission_ms,
        actor_prefill_wall_ms=latency.prefill_wall_ms,
        resident_prefill_used=None,
        decode_ms=decode_ms,
        total_latency_ms=latency.total_ms,
        decode_tokens_per_sec=rate,
        adapter_used=head.adapter,
        thinking_mode="reasoning" if head.thinking.enabled else "non_reasoning",
        finish_reason=finish_reason_name(choice.finish_reason),
        latency=_to_diagnostics(latency),
    )


def to_token_timing(timing: TokenTiming) -> wire.StreamingTokenTiming:
    """The stream event of one token."""
    delivery = timing.delivered_ms - timing.ready_ms
    queue = timing.received_ms - timing.delivered_ms
    return wire.StreamingTokenTiming(
        source="batching_engine",
        token_index=timing.token_index,
        token_id=timing.token_id,
        ready_ms=timing.ready_ms,
        producer_delivered_ms=timing.delivered_ms,
        handler_received_ms=timing.received_ms,
        body_enqueued_ms=timing.enqueued_ms,
        response_delivery_ms=delivery,
        handler_queue_ms=queue,
        queue_delay_ms=delivery + queue,
        client_delivery_ms=timing.enqueued_ms - timing.received_ms,
        blocking_phase=timing.cause,  # type: ignore[arg-type]
        blocking_phase_ms=timing.cause_ms,
    )


def _to_diagnostics(latency: Latency) -> wire.RequestLatencyDiagnostics:
    names = wire.LatencyStallReasonCounts.__struct_fields__
    reasons = {name: latency.stall_reasons.get(name, 0) for name in names}
    return wire.RequestLatencyDiagnostics(
        emitted_tokens=latency.emitted_tokens,
        gap_samples=latency.gap_samples,
        retained_gap_samples=latency.retained_gap_samples,
        gap_samples_truncated=latency.retained_gap_samples < latency.gap_samples,
        ttft_ms=latency.ttft_ms,
        itl_ms_p50=latency.itl_ms_p50,
        itl_ms_p99=latency.itl_ms_p99,
        itl_ms_p999=latency.itl_ms_p999,
        max_itl_ms=latency.max_itl_ms,
        stall_threshold_ms=latency.stall_threshold_ms,
        stall_count=latency.stall_count,
        unexplained_stall_count=reasons["unexplained"],
        stall_reasons=wire.LatencyStallReasonCounts(**reasons),
        phases=_to_phases(latency),
    )


def _to_phases(latency: Latency) -> wire.LatencyPhaseTimings:
    """CPU inference has no readback, graphs, accelerator lock, resizing or training to measure."""
    return wire.LatencyPhaseTimings(
        actor_queue_ms=latency.queue_ms,
        actor_admission_ms=latency.admission_ms,
        tokenization_ms=latency.tokenization_ms,
        prefill_ms=latency.prefill_ms,
        decode_ms=latency.decode_ms,
        actor_cycle_idle_ms=None,
        sampling_ms=latency.sampling_ms,
        readback_ms=None,
        response_delivery_ms=latency.response_delivery_ms,
        handler_queue_ms=latency.handler_queue_ms,
        client_delivery_ms=latency.client_delivery_ms,
        gpu_lock_wait_ms=None,
        graph_capture_ms=None,
        graph_replay_ms=None,
        synchronization_ms=None,
        resize_ms=None,
        trim_ms=None,
        adapter_ms=latency.adapter_ms,
        training_ms=None,
        unexplained_ms=latency.unexplained_ms,
    )
