"""What happened on the engine thread since the last report: gathered, then handed over at once."""

from __future__ import annotations

import time
from collections.abc import Callable

from kiln.engine.messages import StepReport
from kiln.engine.ports import Delivery, EngineStats, StepTimes
from kiln.engine.schedule.scheduler import Scheduler

Publish = Callable[[StepReport], None]


class Outbox:
    """The next report in the making, and totals since the start, which every report carries."""

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._deliveries: dict[int, Delivery] = {}
        # Keys of the sequences that left the queue.
        self.admitted: list[int] = []
        # What the step has spent its time on, in seconds.
        self.decode_s = self.prefill_s = self.sampling_s = 0.0
        self.steps = self.preemptions = 0
        # Tokens: of prompts computed, taken from the prefix cache, and copied back from the host's memory.
        self.computed = self.cached = self.restored = 0
        self.drafted = self.accepted = 0

    def post(self, key: int) -> Delivery:
        """The delivery of a sequence in the next report, to be added to."""
        delivery = self._deliveries.get(key)
        if delivery is None:
            delivery = self._deliveries[key] = Delivery()
        return delivery

    def flush(self, scheduler: Scheduler, *, waiting: int) -> None:
        """Publish the report and begin the next one."""
        stats = EngineStats(
            running=len(scheduler.running),
            waiting=waiting,
            kv_cells_used=scheduler.ledger.cells - scheduler.ledger.free,
            kv_cells=scheduler.ledger.cells,
            steps=self.steps,
            prompt_tokens_computed=self.computed,
            prompt_tokens_cached=self.cached,
            preemptions=self.preemptions,
            adapter_switches=scheduler.switches,
            prompt_tokens_restored=self.restored,
            tokens_drafted=self.drafted,
            drafts_accepted=self.accepted,
        )
        step = StepTimes(self.decode_s, self.prefill_s, self.sampling_s, time.monotonic())
        self._publish(StepReport(self._deliveries, self.admitted, stats, step))
        self._deliveries, self.admitted = {}, []
        self.decode_s = self.prefill_s = self.sampling_s = 0.0
