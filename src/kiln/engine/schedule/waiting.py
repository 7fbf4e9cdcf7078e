"""The waiting line: two classes of requests, each in order of arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from kiln.engine.sequence import Sequence

# So many requests of the first class may overtake a waiting one of the second.
PRIORITY_STREAK = 4


class WaitingLine:
    """Sequences without a slot. Those with priority go first, but not so many in a row that others starve."""

    def __init__(self) -> None:
        self._queues: tuple[deque[Sequence], deque[Sequence]] = (deque(), deque())
        self._streak = 0

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._queue_of(sequence)

    def __iter__(self) -> Iterator[Sequence]:
        """In the order in which they should be admitted."""
        first, second = list(self._queues[0]), list(self._queues[1])
        streak = self._streak
        while first or second:
            if first and (streak < PRIORITY_STREAK or not second):
                streak += 1
                yield first.pop(0)
            else:
                streak = 0
                yield second.pop(0)

    def add(self, sequence: Sequence) -> None:
        self._queue_of(sequence).append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """To the head of its class: it has been admitted before."""
        self._queue_of(sequence).appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take out one that will not be admitted."""
        self._queue_of(sequence).remove(sequence)

    def admit(self, sequence: Sequence) -> None:
        """Take out one that gets a slot."""
        queue = self._queue_of(sequence)
        queue.remove(sequence)
        self._streak = self._streak + 1 if queue is self._queues[0] else 0

    def _queue_of(self, sequence: Sequence) -> deque[Sequence]:
        return self._queues[0 if sequence.request.priority else 1]
