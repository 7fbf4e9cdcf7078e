"""The latency ledger of one completion: cheap notes per token, one reckoning at the end.

All marks come from one monotonic clock. A gap is the time between two tokens' readiness; a gap at
or above max(250 ms, 5 x p50) is a stall, and its cause is the phase that overlaps it most, if that
explains min(250 ms, half the gap).
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kiln.core.latency import Latency, TokenTiming
from kiln.core.tokens import TokenEvent
from kiln.engine.ports import Delivery, StepTimes, Timings

RETAINED_GAPS = 8192
STALL_FLOOR_S = 0.25
STALL_FACTOR = 5.0
# Observers hear of gaps so often, not at every token.
TELL_EVERY_S = 1.0

# Gaps of one choice, in seconds, and when the last of them ended, in `time.monotonic()`.
OnGaps = Callable[["array[float]", float], None]

# A gap's phases, in seconds: another prompt's computation, decoding, sampling, delivery, handler queue.
_PHASES = ("actor_prefill", "actor_decode", "sampling", "response_delivery", "handler_queue")


class Gap(NamedTuple):
    """The time from one token's readiness to the next one's, and what says how it was spent.

    Seconds; `last` is the mark of the earlier token, `before` and `step` are the steps of both.
    """

    seconds: float
    last: float | None
    before: StepTimes | None
    step: StepTimes
    delivery_s: float
    queue_s: float

    def cause(self) -> tuple[str, float]:
        """The phase that took most of it, and its seconds."""
        prefill_s = sampling_s = 0.0
        if self.before is not None and self.last is not None and self.before.handed > self.last:
            # A token is ready before it is sampled, and prompt calls run after the decode call of their
            # step: both delay the next step's token, as far as they lie after this one's readiness.
            after = self.before.handed - self.last
            prefill_s, sampling_s = min(self.before.prefill_s, after), min(self.before.sampling_s, after)
        phases = (prefill_s, self.step.decode_s, sampling_s, self.delivery_s, self.queue_s)
        place = max(range(len(phases)), key=phases.__getitem__)
        return _PHASES[place], phases[place]


class LatencyLedger:
    """Notes one choice's tokens. `started` is `time.monotonic()` at the handler's entry.

    A `measured` ledger also gives each token's timing, which costs more than the notes. The notes are
    numbers in arrays: an object a token, held to the end, would be visited by every garbage collection.
    """

    def __init__(
        self,
        started: float,
        prepare_s: float,
        on_gaps: OnGaps = lambda _, __: None,
        *,
        measured: bool = True,
    ) -> None:
        self._started = started
        self._prepare_s = prepare_s
        self._on_gaps = on_gaps
        self._measured = measured
        self._tokens = 0
        self._first: float | None = None
        self._last: float | None = None
        self._before: StepTimes | None = None
        # Gaps that have been told, bounded, so that an endless completion costs bounded memory, and those
        # that have not.
        self._gaps = array("d")
        self._untold = array("d")
        self._tell_at = 0.0
        self._gap_count = 0
        self._longest = 0.0
        # Of the retained gaps those that may be stalls, with what explains them.
        self._long: list[Gap] = []
        self._delivery_s = 0.0
        self._queue_s = 0.0
        self._client_s = 0.0
        self._received = started

    def received(self, token: TokenEvent, delivery: Delivery) -> TokenTiming | None:
        """Note a delivery's token as it reaches the handler. Its timing, if the ledger is `measured`."""
        now = time.monotonic()
        step, last, ready = delivery.step, self._last, token.ready_s
        handed = step.handed
        delivery_s = handed - ready if handed > ready else 0.0
        queue_s = now - handed if now > handed else 0.0
        seconds = 0.0 if last is None else ready - last
        timing = None
        if self._measured or seconds >= STALL_FLOOR_S:
            gap = Gap(seconds, last, self._before, step, delivery_s, queue_s)
            if self._measured:
                timing = self._timing(token, now, gap)
            if seconds >= STALL_FLOOR_S and not delivery.replayed and self._retained < RETAINED_GAPS:
                self._long.append(gap)
        if last is None:
            self._first = ready
            self._tell_at = ready + TELL_EVERY_S
        elif not delivery.replayed:
            self._untold.append(seconds)
        self._last = ready
        self._before = step
        self._tokens += 1
        self._delivery_s += delivery_s
        self._queue_s += queue_s
        self._received = now
        if self._untold and ready >= self._tell_at:
            self.tell()
        return timing

    def tell(self) -> None:
        """Tell of the gaps that have not been told yet."""
        gaps, last = self._untold, self._last
        if not gaps or last is None:
            return
        self._gap_count += len(gaps)
        self._longest = max(self._longest, max(gaps))
        self._gaps.extend(gaps[: RETAINED_GAPS - len(self._gaps)])
        self._untold = array("d")
        self._tell_at = last + TELL_EVERY_S
        self._on_gaps(gaps, last)

    def enqueued(self) -> None:
        """Note that the last delivery's text was handed to the response body."""
        self._client_s += time.monotonic() - self._received

    def now_ms(self) -> float:
        """Milliseconds since the request's start."""
        return self._ms(time.monotonic())

    def reckon(self, timings: Timings, *, streamed: bool) -> Latency:
        """The account, once the completion has ended."""
        self.tell()
        gaps = np.frombuffer(self._gaps)
        p50, p99, p999 = np.quantile(gaps, (0.5, 0.99, 0.999)) if len(gaps) else (None, None, None)
        threshold = None if p50 is None else max(STALL_FLOOR_S, STALL_FACTOR * float(p50))
        total = time.monotonic() - self._started
        known = self._prepare_s + _between(timings.submitted, timings.admitted)
        known += timings.prefill_s + timings.decode_s + timings.sampling_s + timings.adapter_s
        known += self._delivery_s + self._queue_s
        return Latency(
            emitted_tokens=self._tokens,
            gap_samples=self._gap_count,
            retained_gap_samples=len(self._gaps),
            ttft_ms=None if self._first is None else self._ms(self._first),
            itl_ms_p50=_to_ms(p50),
            itl_ms_p99=_to_ms(p99),
            itl_ms_p999=_to_ms(p999),
            max_itl_ms=_to_ms(self._longest) if self._gap_count else None,
            stall_threshold_ms=_to_ms(threshold),
            stall_reasons=self._stalls(threshold),
            total_ms=total * 1000,
            tokenization_ms=self._prepare_s * 1000,
            queue_ms=_span(timings.submitted, timings.received),
            admission_ms=_span(timings.received, timings.admitted),
            prefill_ms=timings.prefill_s * 1000,
            prefill_wall_ms=_span(timings.admitted, timings.first_token),
            decode_ms=timings.decode_s * 1000,
            sampling_ms=timings.sampling_s * 1000,
            adapter_ms=timings.adapter_s * 1000,
            response_delivery_ms=self._delivery_s * 1000,
            handler_queue_ms=self._queue_s * 1000,
            client_delivery_ms=self._client_s * 1000 if streamed else None,
            unexplained_ms=max(0.0, total - known) * 1000,
        )

    def reckon_cut(self, submitted: float, begun: float | None) -> Latency:
        """The account of a completion that was cut: what its tokens showed, and how long it waited.

        It was submitted and got a place at these marks (None if it never did). What the engine
        spent on it nobody has told.
        """
        waited_s = (time.monotonic() if begun is None else begun) - submitted
        return replace(
            self.reckon(Timings(submitted), streamed=False),
            admission_ms=max(0.0, waited_s) * 1000,
            prefill_ms=None,
            decode_ms=None,
            sampling_ms=None,
            adapter_ms=None,
            unexplained_ms=None,
        )

    def _timing(self, token: TokenEvent, now: float, gap: Gap) -> TokenTiming:
        cause, cause_s = gap.cause()
        first = self._last is None
        return TokenTiming(
            token_index=self._tokens,
            token_id=token.token_id,
            ready_ms=self._ms(token.ready_s),
            delivered_ms=self._ms(max(token.ready_s, gap.step.handed)),
            received_ms=self._ms(max(now, gap.step.handed)),
            enqueued_ms=self._ms(now),
            cause=None if first else cause,
            cause_ms=None if first else cause_s * 1000,
        )

    @property
    def _retained(self) -> int:
        """Retained gaps, those included that have not been told."""
        return len(self._gaps) + len(self._untold)

    def _stalls(self, threshold: float | None) -> dict[str, int]:
        causes: Counter[str] = Counter()
        for gap in self._long:
            if threshold is not None and gap.seconds >= threshold:
                cause, explained = gap.cause()
                enough = explained >= min(STALL_FLOOR_S, gap.seconds / 2)
                causes[cause if enough else "unexplained"] += 1
        return dict(causes)

    def _ms(self, mark: float) -> float:
        return max(0.0, mark - self._started) * 1000


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else _between(start, end) * 1000


def _between(start: float, end: float | None) -> float:
    return 0.0 if end is None else max(0.0, end - start)


def _to_ms(seconds: float | None) -> float | None:
    return None if seconds is None else float(seconds) * 1000
