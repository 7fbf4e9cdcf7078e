"""Whose turn it is: sequences with different sets of adapters cannot share a model call.

llama.cpp's adapters hold for a whole context, so the sequences of one set form a group and the groups
take turns, a few steps each. A switch costs about one step of a small model (the graph is planned
anew), so a turn of one step would halve the speed; a long turn is a pause for everybody else.
"""

from __future__ import annotations

from collections.abc import Iterable

from kiln.engine.ports import AdapterSet

# Groups beyond so many are forgotten, the longest unserved first, and count as never served.
REMEMBERED = 256


class Turns:
    """The rotation: who has the turn, for how many more steps, and who was served when."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._current: AdapterSet = ()
        self._left = steps
        self._served: dict[AdapterSet, int] = {}
        self._clock = 0

    def order(self, groups: Iterable[AdapterSet]) -> list[AdapterSet]:
        """The different groups, the one that should compute now first, then the longest unserved."""
        distinct = dict.fromkeys(groups)
        order = sorted(
            (group for group in distinct if group != self._current), key=lambda g: self._served.get(g, 0)
        )
        if self._current in distinct:
            order.insert(0 if self._left > 0 else len(order), self._current)
        return order

    def give(self, group: AdapterSet) -> None:
        """Let a group have a whole turn, beginning with the next step."""
        self._current, self._left = group, self._steps

    def take(self, group: AdapterSet) -> bool:
        """Note that a group computes a step. True if that is a switch."""
        is_switch = group != self._current
        if is_switch:
            self.give(group)
        self._left -= 1
        self._clock += 1
        # Taken out first, so that the dictionary stays in the order of service.
        self._served.pop(group, None)
        self._served[group] = self._clock
        if len(self._served) > REMEMBERED:
            del self._served[next(iter(self._served))]
        return is_switch
