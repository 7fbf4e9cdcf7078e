"""From the logits of a call to tokens, scores and ends, each sequence for itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kiln.core.errors import InternalError, KilnError
from kiln.core.tokens import FinishReason, TokenEvent
from kiln.engine.outbox import Outbox
from kiln.engine.ports import ScoreSpec
from kiln.engine.runner import Chunk, ModelRunner
from kiln.engine.sampling.picking import choose
from kiln.engine.sampling.scoring import score_position
from kiln.engine.schedule.plan import PlannedCall
from kiln.engine.schedule.scheduler import Scheduler
from kiln.engine.sequence import Sequence

log = logging.getLogger(__name__)

# A sequence that is over, and why; the error is there exactly when the reason is ERROR.
Ending = tuple[Sequence, FinishReason, KilnError | None]


class OutputProcessor:
    """Lives on the engine thread. What it finds goes to the scheduler and into the outbox."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, outbox: Outbox) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._outbox = outbox
        self._post = outbox.post

    def process(self, planned: PlannedCall, logits: NDArray[np.float32], now: float) -> Iterator[Ending]:
        """Take the results of a call that `Scheduler.apply` has written; `logits` as the runner gave them.

        The clock was read once for the call, at `now`. Yields the sequences that end with them, each before
        the next one's results are looked at.
        """
        row = 0
        for sequence, chunk in zip(planned.rows, planned.call.chunks, strict=True):
            rows = logits[row : row + chunk.outputs]
            row += chunk.outputs
            if sequence.generated == 0:
                self._outbox.computed += len(chunk.tokens)
                if sequence.request.narrated:
                    self._post(sequence.key).prompt_read = sequence.computed
            reason, error = None, None
            if sequence.request.scores is not None:
                reason = self._score(sequence, chunk, rows, sequence.request.scores)
            elif chunk.outputs:
                reason, error = self._go_on(sequence, chunk, rows, now)
            if reason is not None:
                yield sequence, reason, error

    def _go_on(
        self, sequence: Sequence, chunk: Chunk, rows: NDArray[np.float32], now: float
    ) -> tuple[FinishReason | None, KilnError | None]:
        """Pick the next token, and those after it for as long as the draft is what is picked.

        Returns why the sequence ends, if it does.
        """
        draft = chunk.tokens[1:] if len(rows) > 1 else ()
        reason, error, picked = None, None, 0
        started = time.monotonic()
        for logits, drafted in zip(rows, (*draft, None), strict=True):
            try:
                token, reason = self._pick(sequence, logits, now)
            except KilnError as failure:
                reason, error = FinishReason.ERROR, failure
                break
            picked += 1
            if reason is not None or token != drafted:
                break
        sequence.sampling_s += time.monotonic() - started
        if draft:
            self._outbox.drafted += len(draft)
            self._outbox.accepted += max(picked - 1, 0)
            assert sequence.slot is not None
            self._runner.trim(sequence.slot, self._scheduler.settle(sequence, chunk, max(picked, 1)))
        return reason, error

    def _pick(
        self, sequence: Sequence, logits: NDArray[np.float32], now: float
    ) -> tuple[int, FinishReason | None]:
        """Pick one token, and say why the sequence ends with it if it does. Raises KilnError."""
        try:
            pick = choose(sequence, logits, now)
        except KilnError:
            raise
        except Exception:
            # A fault in one request's sampling must not cost the others anything.
            log.exception("sampling failed")
            raise InternalError("sampling failed for this request") from None
        top_k = sequence.request.top_logprobs
        score = None if top_k is None else score_position(logits, pick.token, top_k)
        self._post(sequence.key).tokens.append(TokenEvent(pick.token, pick.source, pick.logprob, now, score))
        return pick.token, self._scheduler.accept(sequence, pick, now)

    def _score(
        self, sequence: Sequence, chunk: Chunk, rows: NDArray[np.float32], spec: ScoreSpec
    ) -> FinishReason | None:
        """Score the chunk's tokens. Returns LENGTH with the last one of the prompt."""
        scores = self._post(sequence.key).scores
        for offset, logits in enumerate(rows):
            following = chunk.start + offset + 1
            # After a preemption the prompt is computed again, but each position is reported once.
            if sequence.scored < following < len(sequence.tokens):
                sequence.scored = following
                scores.append(score_position(logits, sequence.tokens[following], spec.top_k))
        return FinishReason.LENGTH if sequence.computed == len(sequence.tokens) else None
