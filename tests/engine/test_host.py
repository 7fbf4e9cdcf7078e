"""Prefixes in the host's memory: what is kept, what is found, what goes first."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from kiln.engine.schedule.host import HEAD, HostPrefixes
from kiln.engine.schedule.prefix import Entry


class Shelf:
    """A store whose data are a hundred bytes a token; `copied` lists the slots that were copied out."""

    def __init__(self, most_tokens: int) -> None:
        self.copied: list[int] = []
        self.lengths: dict[int, int] = {}
        self.host = HostPrefixes(100 * most_tokens, self.save)

    def save(self, slot: int, most_bytes: int) -> NDArray[np.uint8] | None:
        if 100 * self.lengths[slot] > most_bytes:
            return None
        self.copied.append(slot)
        return np.zeros(100 * self.lengths[slot], np.uint8)

    def keep(self, slot: int, ids: list[int], *, scope: str = "", exact: int = 0) -> None:
        self.lengths[slot] = len(ids)
        self.host.keep(entry(slot, ids, scope=scope, exact=exact))

    def found(self, ids: list[int], *, scope: str = "", exact: bool = False) -> int:
        return self.host.match(np.asarray(ids, np.int32), scope=scope, exact=exact)[1]


def entry(slot: int, ids: list[int], *, scope: str = "", exact: int = 0) -> Entry:
    return Entry(slot, np.asarray(ids, np.int32), scope, computed=len(ids), exact=exact, busy=False)


def text(name: int, length: int) -> list[int]:
    return [name] * 10 + list(range(length - 10))


def test_the_longest_usable_prefix_is_found() -> None:
    shelf = Shelf(1000)
    shelf.keep(1, text(1, 100))
    shelf.keep(2, text(1, 90) + [7] * 60)
    assert shelf.found(text(1, 200)) == 100
    assert shelf.found(text(1, 90) + [7] * 30) == 119
    # One token is left to compute.
    assert shelf.found(text(1, 100)) == 99
    assert shelf.found(text(2, 200)) == 0
    assert shelf.found(text(1, 16)) == 0
    assert shelf.found(text(1, 200), scope="adapter") == 0


@pytest.mark.parametrize("exact", [False, True])
def test_the_best_of_many_alike_is_found(exact: bool) -> None:
    generator = np.random.default_rng(3)

    def random_ids() -> list[int]:
        # Few different ids, so that many share much and some are prefixes of others.
        return [1] * 20 + [int(i) for i in generator.integers(0, 2, int(generator.integers(0, 12)))]

    for _ in range(40):
        shelf = Shelf(10_000)
        for slot in range(30):
            ids = random_ids()
            shelf.keep(slot, ids, exact=int(generator.integers(0, len(ids) + 1)))
        for _ in range(20):
            asked = np.asarray(random_ids() + [0], np.int32)
            saved, length = shelf.host.match(asked, scope="", exact=exact)
            known = list(shelf.host._used)
            most = max((other.usable(asked, exact=exact) for other in known), default=0)
            assert length == (most if most >= HEAD else 0)
            if saved is not None:
                equal = [len(other.ids) for other in known if other.usable(asked, exact=exact) == most]
                assert saved.usable(asked, exact=exact) == most and len(saved.ids) == min(equal)


def test_a_long_one_is_not_copied_back_for_a_short_beginning() -> None:
    shelf = Shelf(3000)
    shelf.keep(1, text(1, 2000))
    assert shelf.found(text(1, 30) + [7] * 50) == 0
    assert shelf.found(text(1, 40) + [7] * 50) == 40
    # Of several that begin alike the shortest is enough.
    shelf.keep(2, text(1, 40) + [8] * 50)
    saved, length = shelf.host.match(np.asarray(text(1, 40) + [7] * 50, np.int32), scope="", exact=False)
    assert saved is not None and (len(saved.ids), length) == (90, 40)


def test_exact_requests_take_what_was_computed_exactly() -> None:
    shelf = Shelf(1000)
    shelf.keep(1, text(1, 100), exact=80)
    assert shelf.found(text(1, 200), exact=True) == 80
    assert shelf.found(text(1, 200)) == 100


def test_short_ones_and_known_ones_are_not_copied() -> None:
    shelf = Shelf(1000)
    shelf.keep(1, text(1, 15))
    shelf.keep(2, text(1, 100), exact=100)
    shelf.keep(3, text(1, 90), exact=90)
    shelf.keep(4, text(1, 100))
    assert shelf.copied == [2]


def test_a_longer_one_replaces_what_it_covers() -> None:
    shelf = Shelf(1000)
    shelf.keep(1, text(1, 100))
    shelf.keep(2, text(1, 120), exact=110)
    assert len(shelf.host) == 1
    # What is less exact does not cover.
    shelf.keep(3, text(1, 150))
    assert len(shelf.host) == 2
    assert shelf.found(text(1, 200), exact=True) == 110
    assert shelf.found(text(1, 200)) == 150


def test_the_least_recently_used_goes_first() -> None:
    shelf = Shelf(300)
    for name in (1, 2, 3):
        shelf.keep(name, text(name, 100))
    saved, _ = shelf.host.match(np.asarray(text(1, 100), np.int32), scope="", exact=False)
    assert saved is not None
    shelf.host.touch(saved)
    shelf.keep(4, text(4, 100))
    assert [shelf.found(text(name, 200)) for name in (1, 2, 3, 4)] == [100, 0, 100, 100]


@pytest.mark.parametrize("length", [301, 1000])
def test_what_is_larger_than_the_store_changes_nothing(length: int) -> None:
    shelf = Shelf(300)
    shelf.keep(1, text(1, 100))
    shelf.keep(2, text(2, length))
    assert len(shelf.host) == 1 and shelf.copied == [1]
    assert shelf.found(text(1, 200)) == 100


def test_a_dropped_one_may_still_be_touched() -> None:
    # It was chosen for an admission in the same step in which another one took its place.
    shelf = Shelf(100)
    shelf.keep(1, text(1, 100))
    saved, _ = shelf.host.match(np.asarray(text(1, 100), np.int32), scope="", exact=False)
    assert saved is not None
    shelf.keep(2, text(2, 100))
    shelf.host.touch(saved)
    assert len(shelf.host) == 1
