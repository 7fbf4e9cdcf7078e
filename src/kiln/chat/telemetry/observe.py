"""What the use cases tell about exchanges, for metrics and statistics."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kiln.core.budgets import Budget, Outcome
from kiln.core.completion import ExchangeHead
from kiln.core.errors import KilnError
from kiln.core.latency import Latency


@dataclass(frozen=True, slots=True)
class ChoiceReport:
    """How one choice ended.

    `reason` is a finish reason, `cancelled` when the client went away, or `error` with `error_code`.
    `completion_tokens` and `latency` are of what was generated, also where the choice was cut.
    """

    index: int
    reason: str
    error_code: str | None
    outcome: Outcome | None
    completion_tokens: int
    cached_tokens: int
    latency: Latency

    @property
    def finished(self) -> bool:
        """Whether the choice ran to its end."""
        return self.reason not in ("cancelled", "error")


class Observer(Protocol):
    """Hears what happens. Must be quick and must not raise. All but `turn_refused` come on the event loop."""

    def exchange_started(self, head: ExchangeHead) -> None: ...

    def token_gaps(self, gaps: array[float], ended: float) -> None:
        """Times between the readiness of two tokens of one choice, in seconds.

        The last of them ended at `ended` (`time.monotonic()`). Told about once a second.
        """
        ...

    def choice_ended(self, head: ExchangeHead, report: ChoiceReport) -> None: ...

    def turn_refused(self, budget: Budget, error: KilnError) -> None:
        """A turn failed before it was known whether its budget applies. Called on a worker thread."""
        ...


class Observers:
    """Several observers as one."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def exchange_started(self, head: ExchangeHead) -> None:
        for observer in self._observers:
            observer.exchange_started(head)

    def token_gaps(self, gaps: array[float], ended: float) -> None:
        for observer in self._observers:
            observer.token_gaps(gaps, ended)

    def choice_ended(self, head: ExchangeHead, report: ChoiceReport) -> None:
        for observer in self._observers:
            observer.choice_ended(head, report)

    def turn_refused(self, budget: Budget, error: KilnError) -> None:
        for observer in self._observers:
            observer.turn_refused(budget, error)
