"""The latency ledger on deliveries that a test makes up, on a clock that it turns by hand."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from kiln.chat.telemetry import latency
from kiln.chat.telemetry.latency import RETAINED_GAPS, LatencyLedger
from kiln.core.latency import Latency, TokenTiming
from kiln.core.tokens import Source, TokenEvent
from kiln.engine.ports import Delivery, StepTimes, Timings


class Bench:
    """A ledger and its clock. The request enters at 1000 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(latency, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.ledger = LatencyLedger(1000.0, prepare_s=0.002)
        self.tokens = 0

    def deliver(
        self,
        ready: float,
        *,
        decode: float = 0.0,
        prefill: float = 0.0,
        sampling: float = 0.0,
        handed: float | None = None,
        received: float | None = None,
    ) -> TokenTiming:
        """One token that is ready at a time; it is handed over and received at once unless told."""
        handed = ready + sampling + prefill if handed is None else handed
        self.now = handed if received is None else received
        step = StepTimes(decode, prefill, sampling, handed)
        self.tokens += 1
        event = TokenEvent(self.tokens, Source.SAMPLED, -1.0, ready)
        timing = self.ledger.received(event, Delivery([event], step=step))
        assert timing is not None
        return timing

    def gaps(self, gaps: Sequence[float]) -> None:
        """A first token at 1001 s, and others after these gaps; nothing else takes time."""
        ready = 1001.0
        self.deliver(ready)
        for gap in gaps:
            ready += gap
            self.deliver(ready)

    def reckon(self, timings: Timings | None = None, *, streamed: bool = True) -> Latency:
        return self.ledger.reckon(timings or Timings(1000.0), streamed=streamed)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def r7(values: Sequence[float], q: float) -> float:
    """The R-7 quantile, written out: linear between the two neighbours of (n - 1) q."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * q
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


class TestPercentiles:
    @pytest.mark.parametrize("count", [1, 2, 3, 4, 10, 101, 1000])
    def test_r7(self, bench: Bench, count: int) -> None:
        gaps = np.random.default_rng(count).exponential(0.01, count).tolist()
        bench.gaps(gaps)
        found = bench.reckon()
        assert found.itl_ms_p50 == pytest.approx(1000 * r7(gaps, 0.5), rel=1e-6)
        assert found.itl_ms_p99 == pytest.approx(1000 * r7(gaps, 0.99), rel=1e-6)
        assert found.itl_ms_p999 == pytest.approx(1000 * r7(gaps, 0.999), rel=1e-6)
        assert found.max_itl_ms == pytest.approx(1000 * max(gaps), rel=1e-6)
        assert (found.gap_samples, found.retained_gap_samples) == (count, count)
        assert found.emitted_tokens == count + 1

    def test_known_values(self, bench: Bench) -> None:
        bench.gaps([0.001, 0.002, 0.003, 0.010])
        found = bench.reckon()
        assert found.itl_ms_p50 == pytest.approx(2.5)
        assert found.itl_ms_p99 == pytest.approx(3 + 7 * 0.97)
        assert found.itl_ms_p999 == pytest.approx(3 + 7 * 0.997)

    def test_no_token(self, bench: Bench) -> None:
        found = bench.reckon()
        assert (found.emitted_tokens, found.gap_samples, found.stall_count) == (0, 0, 0)
        assert found.ttft_ms is None
        assert found.itl_ms_p50 is found.itl_ms_p99 is found.itl_ms_p999 is found.max_itl_ms is None
        assert found.stall_threshold_ms is None

    def test_one_token(self, bench: Bench) -> None:
        bench.deliver(1000.5)
        found = bench.reckon()
        assert found.ttft_ms == pytest.approx(500)
        assert (found.emitted_tokens, found.gap_samples) == (1, 0)
        assert found.itl_ms_p50 is found.max_itl_ms is None

    def test_a_bounded_number_is_kept(self, bench: Bench) -> None:
        bench.gaps([0.001] * RETAINED_GAPS + [0.5, 0.002])
        found = bench.reckon()
        assert RETAINED_GAPS == found.retained_gap_samples == 8192
        assert found.gap_samples == 8194
        # The longest is known although it is not retained; the percentiles are of the retained ones.
        assert found.max_itl_ms == pytest.approx(500)
        assert found.itl_ms_p999 == pytest.approx(1, rel=1e-6)

    def test_exactly_the_bound(self, bench: Bench) -> None:
        bench.gaps([0.001] * RETAINED_GAPS)
        found = bench.reckon()
        assert found.gap_samples == found.retained_gap_samples == 8192

    def test_a_stall_beyond_the_bound_is_not_counted(self, bench: Bench) -> None:
        bench.gaps([0.001] * (RETAINED_GAPS - 1) + [0.5, 0.6])
        assert bench.reckon().stall_count == 1


class TestTelling:
    @pytest.fixture
    def told(self, bench: Bench) -> list[tuple[list[float], float]]:
        told: list[tuple[list[float], float]] = []
        bench.ledger = LatencyLedger(1000.0, 0.0, lambda gaps, ended: told.append((list(gaps), ended)))
        return told

    def test_once_a_second_and_at_the_end(self, bench: Bench, told: list[tuple[list[float], float]]) -> None:
        bench.gaps([0.25] * 9)
        assert told == [([0.25] * 4, 1002.0), ([0.25] * 4, 1003.0)]
        bench.reckon()
        assert told[2:] == [([0.25], 1003.25)]
        bench.ledger.tell()
        assert len(told) == 3

    def test_a_long_gap_is_told_when_it_ends(
        self, bench: Bench, told: list[tuple[list[float], float]]
    ) -> None:
        bench.gaps([0.25, 90.0])
        assert told == [([0.25, 90.0], 1091.25)]

    def test_nothing_to_tell(self, bench: Bench, told: list[tuple[list[float], float]]) -> None:
        bench.reckon()
        bench.deliver(1001.0)
        bench.ledger.tell()
        assert told == []


class TestStalls:
    @pytest.mark.parametrize(
        ("usual", "threshold"), [(0.01, 0.25), (0.05, 0.25), (0.06, 0.3), (0.2, 1.0)], ids=str
    )
    def test_the_threshold(self, bench: Bench, usual: float, threshold: float) -> None:
        bench.gaps([usual] * 9 + [threshold - 0.001] + [usual] * 9 + [threshold + 0.001] + [usual])
        found = bench.reckon()
        assert found.stall_threshold_ms == pytest.approx(1000 * threshold)
        assert found.stall_count == 1
        assert found.stall_reasons == {"unexplained": 1}

    @pytest.mark.parametrize(
        ("gap", "explained", "cause"),
        [
            # min(250 ms, half the gap) must be explained.
            (0.3, 0.16, "actor_decode"),
            (0.3, 0.14, "unexplained"),
            (0.5, 0.26, "actor_decode"),
            (0.5, 0.24, "unexplained"),
            (2.0, 0.26, "actor_decode"),
            (2.0, 0.24, "unexplained"),
        ],
    )
    def test_what_a_cause_must_explain(self, bench: Bench, gap: float, explained: float, cause: str) -> None:
        bench.gaps([0.01] * 9)
        bench.deliver(1001.09 + gap, decode=explained)
        assert bench.reckon().stall_reasons == {cause: 1}

    def test_decoding(self, bench: Bench) -> None:
        bench.gaps([0.01] * 3)
        bench.deliver(1001.53, decode=0.49)
        assert bench.reckon().stall_reasons == {"actor_decode": 1}

    def test_another_prompt(self, bench: Bench) -> None:
        """Prompt calls run after the decode call, so they delay the next step's token."""
        bench.gaps([0.01] * 3)
        bench.deliver(1001.04, decode=0.01, prefill=0.4)
        bench.deliver(1001.45, decode=0.01)
        assert bench.reckon().stall_reasons == {"actor_prefill": 1}

    def test_sampling(self, bench: Bench) -> None:
        """A token is ready when its logits are, so its own step's sampling delays the next one."""
        bench.gaps([0.01] * 3)
        bench.deliver(1001.04, decode=0.01, sampling=0.4)
        bench.deliver(1001.45, decode=0.01)
        assert bench.reckon().stall_reasons == {"sampling": 1}

    def test_a_prompt_that_was_admitted_in_the_same_step(self, bench: Bench) -> None:
        """The first token comes out of its prompt call; another prompt's call may follow in that step."""
        bench.deliver(1000.1, prefill=0.5, handed=1000.5)
        bench.deliver(1000.51, decode=0.01)
        for i in range(9):
            bench.deliver(1000.52 + i / 100, decode=0.01)
        assert bench.reckon().stall_reasons == {"actor_prefill": 1}

    def test_the_own_prompt_is_no_stall(self, bench: Bench) -> None:
        bench.deliver(1002.0, prefill=2.0, handed=1002.0)
        bench.deliver(1002.01, decode=0.01)
        found = bench.reckon()
        assert found.stall_count == 0
        assert found.ttft_ms == pytest.approx(2000)

    def test_each_is_counted_once(self, bench: Bench) -> None:
        bench.gaps([0.01] * 20)
        bench.deliver(1001.7, decode=0.5)
        bench.deliver(1002.3, decode=0.6)
        bench.deliver(1003.0)
        found = bench.reckon()
        assert found.stall_reasons == {"actor_decode": 2, "unexplained": 1}
        assert found.stall_count == 3


class TestTimings:
    def test_marks(self, bench: Bench) -> None:
        bench.deliver(1000.1)
        timing = bench.deliver(1000.2, decode=0.09, handed=1000.25, received=1000.4)
        assert (timing.token_index, timing.token_id) == (1, 2)
        assert timing.ready_ms == pytest.approx(200)
        assert timing.delivered_ms == pytest.approx(250)
        assert timing.received_ms == pytest.approx(400)
        assert timing.enqueued_ms >= timing.received_ms
        assert timing.cause == "handler_queue"
        assert timing.cause_ms == pytest.approx(150)

    def test_the_first_token_has_no_cause(self, bench: Bench) -> None:
        timing = bench.deliver(1000.1, decode=0.09, received=1000.4)
        assert timing.cause is None
        assert timing.cause_ms is None

    def test_clocks_that_run_backwards_a_little(self, bench: Bench) -> None:
        bench.deliver(1000.1)
        timing = bench.deliver(1000.2, handed=1000.2002, received=1000.2001)
        marks = [timing.ready_ms, timing.delivered_ms, timing.received_ms]
        assert marks == sorted(marks)
        found = bench.reckon()
        assert (found.response_delivery_ms or 0) >= 0
        assert (found.handler_queue_ms or 0) >= 0

    def test_the_sums(self, bench: Bench) -> None:
        bench.deliver(1000.10, handed=1000.11, received=1000.14)
        bench.now = 1000.15
        bench.ledger.enqueued()
        bench.deliver(1000.20, handed=1000.22, received=1000.23)
        bench.now = 1000.26
        bench.ledger.enqueued()
        bench.now = 1000.3
        timings = Timings(
            1000.01,
            received=1000.02,
            admitted=1000.05,
            first_token=1000.10,
            prefill_s=0.04,
            decode_s=0.03,
            sampling_s=0.01,
        )
        found = bench.reckon(timings)
        assert found.tokenization_ms == pytest.approx(2)
        assert found.queue_ms == pytest.approx(10)
        assert found.admission_ms == pytest.approx(30)
        assert found.prefill_wall_ms == pytest.approx(50)
        assert found.prefill_ms == pytest.approx(40)
        assert found.decode_ms == pytest.approx(30)
        assert found.sampling_ms == pytest.approx(10)
        assert found.response_delivery_ms == pytest.approx(30)
        assert found.handler_queue_ms == pytest.approx(40)
        assert found.client_delivery_ms == pytest.approx(40)
        assert found.total_ms == pytest.approx(300)
        # What no phase explains is never negative.
        assert found.unexplained_ms is not None
        assert 0 <= found.unexplained_ms <= 300

    def test_what_was_not_measured_is_none(self, bench: Bench) -> None:
        found = bench.reckon(streamed=False)
        assert found.client_delivery_ms is None
        assert found.queue_ms is found.admission_ms is found.prefill_wall_ms is None
        assert found.unexplained_ms is not None
