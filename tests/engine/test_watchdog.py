"""The watchdog against a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from kiln.engine.process.watchdog import GRACE_S, Watchdog


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time is a number."""

    now = 0.0

    def time(self) -> float:
        return self.now


class Watched:
    def __init__(self, loop: Clock, timeout_s: float | None) -> None:
        self.loop = loop
        self.hangs = 0
        self.dog = Watchdog(timeout_s, self.note)

    def note(self) -> None:
        self.hangs += 1

    def do(self, action: str, *, owes_more: bool = False) -> None:
        async def act() -> None:
            if action == "heard":
                self.dog.heard(owes_more=owes_more)
            else:
                getattr(self.dog, action)()

        self.loop.run_until_complete(act())

    def wait(self, seconds: float) -> int:
        """Let time pass, in steps in which every timer that is due fires."""

        async def turn() -> None:
            await asyncio.sleep(0)

        end = self.loop.now + seconds
        while self.loop.now < end:
            self.loop.now = min(end, self.loop.now + 0.25)
            self.loop.run_until_complete(turn())
        return self.hangs


@pytest.fixture
def loop() -> Iterator[Clock]:
    made = Clock()
    yield made
    made.close()


def test_a_report_that_is_owed_for_too_long(loop: Clock) -> None:
    watched = Watched(loop, 10.0)
    watched.do("expect")
    assert watched.wait(9.0) == 0
    assert watched.wait(1.0 + GRACE_S + 0.5) == 1
    # Once is enough: what hung is being ended.
    assert watched.wait(100.0) == 1


def test_reports_put_it_off_as_long_as_they_come(loop: Clock) -> None:
    watched = Watched(loop, 10.0)
    watched.do("expect")
    for _ in range(20):
        watched.wait(9.0)
        watched.do("heard", owes_more=True)
    assert watched.hangs == 0
    assert watched.wait(12.0) == 1


def test_an_idle_worker_owes_nothing(loop: Clock) -> None:
    watched = Watched(loop, 10.0)
    watched.do("expect")
    watched.wait(5.0)
    watched.do("heard")
    assert watched.wait(100.0) == 0
    watched.do("expect")
    assert watched.wait(9.0) == 0
    assert watched.wait(3.0) == 1


def test_more_commands_do_not_put_it_off(loop: Clock) -> None:
    watched = Watched(loop, 10.0)
    for _ in range(4):
        watched.do("expect")
        watched.wait(3.0)
    assert watched.hangs == 1


def test_a_report_that_lay_unread_counts(loop: Clock) -> None:
    # This process stood still for a minute: the timer fires before the report is read.
    watched = Watched(loop, 10.0)
    watched.do("expect")
    loop.now += 60.0
    watched.wait(0.5)
    watched.do("heard", owes_more=True)
    assert watched.wait(9.0) == 0
    assert watched.wait(3.0) == 1


def test_nothing_is_owed_by_one_that_has_ended(loop: Clock) -> None:
    watched = Watched(loop, 10.0)
    watched.do("expect")
    watched.wait(10.5)
    watched.do("rest")
    assert watched.wait(100.0) == 0


def test_without_a_limit_it_sleeps(loop: Clock) -> None:
    watched = Watched(loop, None)
    watched.do("expect")
    watched.do("heard", owes_more=True)
    assert watched.wait(1e4) == 0
