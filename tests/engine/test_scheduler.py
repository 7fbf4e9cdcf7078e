"""The scheduler driven by random workloads, against a KV cache that notices everything."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from kiln.core.sampling import SamplingParams
from kiln.core.tokens import FinishReason, Source
from kiln.engine.ports import AdapterUse, GenerationRequest, adapter_set
from kiln.engine.runner import Chunk
from kiln.engine.sampling.speculation import Drafter
from kiln.engine.schedule.host import HostPrefixes
from kiln.engine.schedule.plan import Limits, Pick, PlannedCall, Restore
from kiln.engine.schedule.scheduler import Scheduler
from kiln.engine.sequence import Sequence

from .cells import CellPool

GREEDY = SamplingParams(temperature=0.0)


# Prompts begin like one of these, so that prefixes are shared.
DOCUMENTS = [[1] * 60, [1] * 18 + [2] * 42, [3, 4] * 30]


def next_token(context: SequenceOf[int]) -> int:
    """What the pretended model says: a lost, doubled or misplaced token changes all that follows."""
    state = len(context)
    for token in context:
        state = (state * 31 + token + 1) % 1_000_003
    return state % 97


def expected_tokens(prompt: SequenceOf[int], max_tokens: int) -> list[int]:
    out = list(prompt)
    for _ in range(max_tokens):
        out.append(next_token(out))
    return out


def limits(
    *,
    running: int = 2,
    slots: int | None = None,
    kv_cells: int = 64,
    step_tokens: int = 16,
    stall_tokens: int | None = None,
    max_rows: int = 64,
    can_share: bool = True,
    turn_steps: int = 4,
    draft_rows: int = 0,
    exact_drafts: bool = True,
    retain_tokens: int = 2**31,
) -> Limits:
    return Limits(
        running=running,
        slots=running + 1 if slots is None else slots,
        kv_cells=kv_cells,
        step_tokens=step_tokens,
        stall_tokens=step_tokens if stall_tokens is None else stall_tokens,
        max_rows=max_rows,
        can_share=can_share,
        turn_steps=turn_steps,
        draft_rows=draft_rows,
        exact_drafts=exact_drafts,
        retain_tokens=retain_tokens,
    )


class PretendDrafter(Drafter):
    """Knows what will be said, and is wrong at every place that `wrong` divides."""

    def __init__(self, prompt: SequenceOf[int], max_tokens: int, wrong: int) -> None:
        self.text = expected_tokens(prompt, max_tokens)
        self.at = len(prompt)
        self.wrong = wrong
        self.judged: list[tuple[int, int]] = []

    def record(self, token: int) -> None:
        self.at += 1

    def judge(self, drafted: int, accepted: int) -> None:
        self.judged.append((drafted, accepted))

    def propose(self, most: int) -> list[int]:
        draft = self.text[self.at : self.at + min(most, 4)]
        return [-1 if place % self.wrong == 0 else token for place, token in enumerate(draft, self.at)]


class World:
    """A scheduler, a cache of its own accounting, and everything that must hold at every step.

    A slot of the cache is a list of (cell, token, scope, computed exactly); copies share cells.
    """

    def __init__(self, limits: Limits, host_bytes: int = 0) -> None:
        """Saved prefixes take a byte a token."""
        self.scheduler = Scheduler(limits, HostPrefixes(host_bytes, self.save) if host_bytes else None)
        # What was saved, by the id of the data that stands for it.
        self.saved: dict[int, list[tuple[int, int, object, bool]]] = {}
        self.kept_alive: list[NDArray[np.uint8]] = []
        self.restored = 0
        self.limits = limits
        self.kv: dict[int, list[tuple[int, int, object, bool]]] = {}
        self.pool = CellPool(limits.kv_cells)
        self.dead: set[int] = set()
        self.submitted: list[Sequence] = []
        self.admitted: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.removed: list[Sequence] = []

    def add(
        self,
        prompt: SequenceOf[int],
        max_tokens: int,
        *,
        exact: bool = False,
        priority: bool = False,
        adapters: str = "",
        drafts_wrong: int | None = None,
    ) -> Sequence:
        """`adapters` are paths of one letter each; every `drafts_wrong`-th place of drafts is wrong."""
        key = len(self.submitted)
        request = GenerationRequest(
            tuple(prompt),
            max_tokens,
            GREEDY,
            seed=key,
            exact=exact,
            priority=priority,
            adapters=tuple(AdapterUse(path, 1.0) for path in adapters),
            scope=adapters,
        )
        sequence = Sequence(key, request, None, 0.0)
        if drafts_wrong is not None:
            sequence.drafter = PretendDrafter(prompt, max_tokens, drafts_wrong)
        self.submitted.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        self.drop(self.scheduler.finish(sequence))
        self.removed.append(sequence)

    def preempt_youngest(self) -> None:
        """What the loop does when the runner says that its cache is full."""
        if len(self.scheduler.running) > 1:
            self.drop([self.scheduler.preempt(self.scheduler.running[-1])])

    def drop(self, slots: SequenceOf[int]) -> None:
        for slot in slots:
            self.dead |= {cell for cell, _, _, _ in self.kv.pop(slot, [])}

    def save(self, slot: int, most_bytes: int) -> NDArray[np.uint8] | None:
        if len(self.kv[slot]) > most_bytes:
            return None
        data = np.zeros(len(self.kv[slot]), np.uint8)
        self.saved[id(data)] = list(self.kv[slot])
        self.kept_alive.append(data)
        return data

    def restore(self, copy: Restore) -> None:
        was = self.saved[id(copy.saved.data)]
        assert [token for _, token, _, _ in was] == copy.saved.ids.tolist()
        cells = self.pool.take(len(was))
        held = [
            (cell, token, scope, exact) for cell, (_, token, scope, exact) in zip(cells, was, strict=True)
        ]
        self.kv[copy.target] = held[: copy.length]
        self.dead |= set(cells[copy.length :])
        self.restored += copy.length

    def collect(self) -> None:
        held = {cell for kept in self.kv.values() for cell, _, _, _ in kept}
        self.pool.free(self.dead - held)
        self.dead = set()

    def tidy(self) -> None:
        """What the loop does when it has been idle for a while."""
        while slots := self.scheduler.tidy():
            self.drop(slots)
        if self.scheduler.collect_now():
            self.collect()

    @property
    def live(self) -> list[Sequence]:
        ended = {s.key for s in (*self.finished, *self.removed)}
        return [s for s in self.submitted if s.key not in ended]

    def step(self) -> None:
        before = self.snapshot()
        step = self.scheduler.schedule()
        assert self.snapshot() == before, "schedule must not write"
        dropped, copies = self.scheduler.begin(step, 0.0)
        self.drop(dropped)
        if step.collects:
            self.collect()
        if step.stuck is not None:
            self.drop(self.scheduler.finish(step.stuck))
            self.removed.append(step.stuck)
        for copy in copies:
            assert not self.kv.get(copy.target), "a copy into a slot in use"
            if isinstance(copy, Restore):
                self.restore(copy)
                continue
            self.kv[copy.target] = self.kv[copy.source][: copy.length]
            assert len(self.kv[copy.target]) == copy.length
        self.admitted += [a.sequence for a in step.admitted if a.sequence not in self.admitted]
        decoding = {s.key for planned in step.decode for s in planned.rows}
        for planned in step.decode:
            for chunk in planned.call.chunks:
                assert chunk.logits == ("last" if len(chunk.tokens) == 1 else "all")
            assert all(sequence.is_decoding for sequence in planned.rows)
            assert planned.call.rows <= 63
            self.compute(planned)
        drafted = sum(planned.call.rows - len(planned.rows) for planned in step.decode)
        assert drafted == 0 or drafted + len(decoding) <= self.limits.draft_rows
        budget = self.limits.step_tokens
        if decoding:
            budget = min(budget, self.limits.stall_tokens)
        assert sum(planned.call.rows for planned in step.prefill) <= min(budget, self.limits.max_rows)
        # Adapters hold for a whole call; a turn is a whole step.
        assert len({planned.call.adapters for planned in (*step.decode, *step.prefill)}) <= 1
        for planned in step.prefill:
            assert not decoding & {s.key for s in planned.rows}
            assert len({s.exact for s in planned.rows}) == 1
            assert planned.call.exact is planned.rows[0].exact
            assert not planned.call.exact or planned.call.rows <= 63
            self.compute(planned)

    def compute(self, planned: PlannedCall) -> None:
        call, rows = planned.call, planned.rows
        assert call.rows <= self.limits.max_rows
        slots = [chunk.sequence for chunk in call.chunks]
        assert len(set(slots)) == len(slots)
        cells = iter(self.pool.take(call.rows))
        for chunk, sequence in zip(call.chunks, rows, strict=True):
            assert chunk.sequence == sequence.slot
            assert call.adapters == adapter_set(sequence.request.adapters)
            held = self.kv.setdefault(chunk.sequence, [])
            assert chunk.start == len(held)
            assert len(chunk.tokens) > 0
            held.extend((next(cells), t, sequence.scope, call.exact) for t in chunk.tokens)
            known = [*sequence.tokens, *chunk.tokens[1:]] if sequence.is_decoding else sequence.tokens
            assert [token for _, token, _, _ in held] == known[: len(held)]
            assert (chunk.logits != "none") is (len(held) >= len(sequence.tokens))
            assert all(scope == sequence.scope for _, _, scope, _ in held)
            if sequence.exact:
                assert all(exact for _, _, _, exact in held), "an exact request over inexact KV"
                places = [cell for cell, _, _, _ in held]
                assert places == sorted(places), "the cells of an exact request are out of order"
        assert self.cells_held() <= self.limits.kv_cells
        self.scheduler.apply(planned)
        for chunk, sequence in zip(call.chunks, rows, strict=True):
            if chunk.logits != "none":
                self.pick(sequence, chunk)

    def pick(self, sequence: Sequence, chunk: Chunk) -> None:
        """What the loop does with the logits of a chunk."""
        context = [token for _, token, _, _ in self.kv[chunk.sequence]]
        draft = [] if chunk.logits == "last" else list(chunk.tokens[1:])
        reason, picked = None, 0
        for drafted in (*draft, None):
            token = next_token(context[: len(context) - len(draft) + picked])
            reason = self.scheduler.accept(sequence, Pick(token, Source.SAMPLED, 0.0), 0.0)
            picked += 1
            if reason is not None or token != drafted:
                break
        if draft:
            length = self.scheduler.settle(sequence, chunk, picked)
            held = self.kv[chunk.sequence]
            self.dead |= {cell for cell, _, _, _ in held[length:]}
            del held[length:]
        if reason is not None:
            self.drop(self.scheduler.finish(sequence))
            self.finished.append(sequence)

    def cells_held(self) -> int:
        return len({cell for held in self.kv.values() for cell, _, _, _ in held})

    def snapshot(self) -> object:
        scheduler = self.scheduler
        return (
            [(s.key, s.slot, s.computed, len(s.tokens)) for s in self.submitted],
            [s.key for s in scheduler.running],
            scheduler.ledger.free,
            scheduler.waiting,
            [entry.slot for entry in scheduler.prefixes.retained()],
        )

    def check(self) -> None:
        scheduler = self.scheduler
        scheduler.ledger.check()
        running = list(scheduler.running)
        held = [s.slot for s in running]
        assert None not in held and len(set(held)) == len(held) <= self.limits.running
        assert {s.key for s in running} <= {s.key for s in self.live}
        idle = [s for s in self.live if s not in running]
        assert len(idle) == scheduler.waiting
        assert all(s.slot is None and s.computed == 0 for s in idle)
        assert scheduler.ledger.free + scheduler.ledger.dead == self.limits.kv_cells - self.cells_held()
        assert scheduler.ledger.free == self.limits.kv_cells - self.pool.taken
        for s in self.finished:
            assert s.tokens == expected_tokens(s.request.prompt_ids, s.request.max_tokens)

    def finish(self) -> None:
        """Run until nothing is left, within as many steps as every request recomputed for every other."""
        rows = sum(len(s.request.prompt_ids) + s.request.max_tokens for s in self.live)
        for _ in range(2 * (rows + 1) * (len(self.live) + 1)):
            if self.scheduler.is_idle:
                break
            self.step()
            self.check()
        assert self.scheduler.is_idle, "requests starve"
        assert not self.live
        self.drop(self.scheduler.forget_all())
        assert not self.kv
        self.check()


@st.composite
def all_limits(draw: st.DrawFn) -> Limits:
    running = draw(st.integers(1, 4))
    step_tokens = draw(st.integers(1, 32))
    return Limits(
        running=running,
        slots=running + draw(st.integers(1, 3)),
        kv_cells=draw(st.integers(8, 80) | st.integers(80, 200)),
        step_tokens=step_tokens,
        stall_tokens=draw(st.integers(1, 2 * step_tokens)),
        max_rows=draw(st.integers(max(running, 2), 40)),
        can_share=draw(st.booleans()),
        turn_steps=draw(st.integers(1, 5)),
        draft_rows=draw(st.just(0) | st.integers(2, 20)),
        exact_drafts=draw(st.booleans()),
        retain_tokens=draw(st.just(2**31) | st.integers(0, 100)),
    )


HOST_BYTES = st.just(0) | st.integers(20, 300)


@st.composite
def requests(draw: st.DrawFn, kv_cells: int) -> tuple[list[int], int]:
    """A prompt and a completion that fit the cache together, as the port promises."""
    length = draw(st.integers(1, min(kv_cells - 1, 50)))
    prompt = draw(st.sampled_from(DOCUMENTS))[:length]
    prompt[-1:] = [draw(st.integers(1, 6))]
    return prompt, draw(st.integers(1, min(kv_cells - length, 20)))


def add_any(world: World, data: st.DataObject) -> None:
    prompt, max_tokens = data.draw(requests(world.limits.kv_cells))
    world.add(
        prompt,
        max_tokens,
        exact=data.draw(st.booleans()),
        priority=data.draw(st.booleans()),
        adapters=data.draw(st.sampled_from(["", "", "a", "b", "ab"])),
        drafts_wrong=data.draw(st.none() | st.integers(1, 9)),
    )


@settings(max_examples=50, deadline=None)
@given(all_limits(), st.data())
def test_every_request_finishes_with_the_tokens_it_has_alone(limits: Limits, data: st.DataObject) -> None:
    world = World(limits, data.draw(HOST_BYTES))
    for _ in range(data.draw(st.integers(1, 7))):
        add_any(world, data)
    world.finish()
    assert len(world.finished) == len(world.submitted)


@settings(max_examples=30, deadline=None)
@given(all_limits(), st.data())
def test_requests_one_after_another(limits: Limits, data: st.DataObject) -> None:
    world = World(limits, data.draw(HOST_BYTES))
    for _ in range(data.draw(st.integers(1, 5))):
        add_any(world, data)
        for _ in range(10_000):
            if world.scheduler.is_idle:
                break
            world.step()
            world.check()
        assert world.scheduler.is_idle, "a request starves although it is alone"
        if data.draw(st.booleans()):
            world.tidy()
            world.check()


@settings(max_examples=30, deadline=None)
@given(all_limits(), st.data())
def test_first_come_first_admitted(limits: Limits, data: st.DataObject) -> None:
    # Prompts that share nothing and are of one class: nobody has a reason to overtake.
    world = World(limits)
    for key in range(data.draw(st.integers(1, 7))):
        prompt, max_tokens = data.draw(requests(limits.kv_cells))
        world.add([100 + key] * len(prompt), max_tokens)
    world.finish()
    assert [s.key for s in world.admitted] == list(range(len(world.submitted)))


class Traffic(RuleBasedStateMachine):
    """Requests that come, run and are cancelled in any order."""

    @initialize(limits=all_limits(), host_bytes=HOST_BYTES)
    def begin(self, limits: Limits, host_bytes: int) -> None:
        self.world = World(limits, host_bytes)

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        add_any(self.world, data)

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.world.live:
            self.world.remove(data.draw(st.sampled_from(self.world.live)))

    @rule()
    def preempt(self) -> None:
        self.world.preempt_youngest()

    @rule()
    def tidy(self) -> None:
        self.world.tidy()

    @rule()
    def forget_all(self) -> None:
        self.world.drop(self.world.scheduler.forget_all())

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


# Single rules, by example.


def test_prefill_is_chunked_and_decode_has_calls_of_its_own() -> None:
    world = World(limits(step_tokens=8, stall_tokens=4))
    first = world.add([1, 2], 8)
    world.step()
    assert first.generated == 1
    second = world.add([5] * 6, 4)
    step = world.scheduler.schedule()
    assert [planned.rows for planned in step.decode] == [(first,)]
    assert [planned.rows for planned in step.prefill] == [(second,)]
    (chunk,) = step.prefill[0].call.chunks
    assert (list(chunk.tokens), chunk.logits) == ([5] * 4, "none")
    world.step()
    world.step()
    assert second.generated == 1 and first.generated == 3


def test_a_short_prompt_does_not_wait_for_the_whole_of_a_long_one() -> None:
    world = World(limits(step_tokens=8, stall_tokens=8))
    long = world.add([1, 2] * 20, 1)
    world.step()
    assert long.computed == 8
    short = world.add([5] * 4, 1)
    world.step()
    assert short.generated == 1 and long.computed == 12
    # Alone again, it has the whole step.
    world.step()
    assert long.computed == 20


def test_max_rows_bounds_the_prefill_too() -> None:
    world = World(limits(step_tokens=100, max_rows=3))
    world.add([1] * 7, 1)
    (planned,) = world.scheduler.schedule().prefill
    assert planned.call.rows == 3


def test_the_head_of_the_queue_is_not_overtaken() -> None:
    world = World(limits(running=4, kv_cells=16))
    world.add([1] * 8, 4)
    world.add([2] * 12, 2)
    world.add([3], 2)
    world.step()
    assert [s.key for s in world.admitted] == [0]
    world.finish()
    assert [s.key for s in world.admitted] == [0, 1, 2]


def test_the_youngest_gives_way_and_loses_nothing() -> None:
    world = World(limits(kv_cells=12))
    old, young = world.add([1] * 4, 8), world.add([2] * 4, 8)
    preempted = False
    while world.live:
        world.step()
        world.check()
        preempted = preempted or (old in world.live and young.generated > 0 and young.slot is None)
    assert preempted
    assert world.finished == [old, young]


def test_preempted_sequences_go_first_and_in_their_order() -> None:
    world = World(limits(running=3))
    for token in (10, 20, 30):
        world.add([token] * 3, 3)
    world.step()
    world.add([40], 1)
    world.preempt_youngest()
    world.preempt_youngest()
    assert [s.key for s in world.scheduler.running] == [0]
    world.step()
    assert [s.key for s in world.scheduler.running][:3] == [0, 1, 2]


def test_a_prefix_is_computed_once() -> None:
    world = World(limits(kv_cells=128, step_tokens=64))
    world.add([7] * 30, 2)
    while world.live:
        world.step()
    again = world.add([7] * 30 + [8], 2)
    step = world.scheduler.schedule()
    assert [planned.call.rows for planned in step.prefill] == [1]
    world.step()
    assert again.cached_tokens == 30


def test_a_prefix_of_another_scope_or_computed_otherwise_is_not_reused() -> None:
    world = World(limits(kv_cells=256, step_tokens=64))
    world.add([7] * 30, 1)
    while world.live:
        world.step()
    for adapters, exact in (("a", False), ("", True)):
        other = world.add([7] * 30, 1, adapters=adapters, exact=exact)
        world.step()
        assert other.cached_tokens == 0
        assert not world.live


def test_a_prefix_beyond_what_is_retained_comes_back_from_the_host() -> None:
    world = World(limits(kv_cells=256, step_tokens=64, retain_tokens=0), host_bytes=100)
    world.add([7] * 30, 1, exact=True)
    while world.live:
        world.step()
    # The next request might begin with it; when none comes, the cache is emptied.
    assert world.kv
    world.tidy()
    assert not world.kv and not world.dead
    # It comes back once for all who want it.
    again = [world.add([7] * 30 + [n], 2, exact=n > 8) for n in (8, 9)]
    step = world.scheduler.schedule()
    assert [admission.shared for admission in step.admitted] == [30]
    while world.live:
        world.step()
        world.check()
    assert [s.cached_tokens for s in again] == [30, 30]
    assert world.restored == 30


def test_what_comes_back_is_as_exact_as_it_was() -> None:
    for exact in (False, True):
        world = World(limits(running=2, kv_cells=256, step_tokens=64, retain_tokens=0), host_bytes=100)
        world.add([7] * 30, 1, exact=exact)
        while world.live:
            world.step()
        world.tidy()
        # An ordinary request brings it back; an exact one comes while it is in the cache.
        world.add([7] * 30 + [8], 20)
        world.step()
        assert world.restored == 30
        other = world.add([7] * 30 + [9], 2, exact=True)
        world.finish()
        assert other.cached_tokens == (30 if exact else 0)


def test_what_is_given_up_while_others_run_is_copied_before_cells_are_collected() -> None:
    world = World(limits(running=2, kv_cells=512, step_tokens=128, retain_tokens=0), host_bytes=500)
    # One that ends leaves dead cells, which wait for the exact one beside it to end.
    world.add([8] * 80, 1)
    world.add([7] * 100, 10, exact=True)
    while world.live:
        world.step()
    assert world.dead
    world.add([9] * 10, 30)
    for _ in range(8):
        world.step()
    again = world.add([7] * 100 + [1], 2, exact=True)
    world.finish()
    assert again.cached_tokens == 100


def test_a_saved_prefix_that_does_not_fit_is_computed_again() -> None:
    world = World(limits(running=1, slots=2, kv_cells=50, step_tokens=64, retain_tokens=0), host_bytes=100)
    world.add([7] * 40, 1)
    while world.live:
        world.step()
    world.tidy()
    # Of forty tokens it could use twenty, but all forty would have to come back.
    world.add([7] * 20 + [8] * 10, 10)
    world.finish()
    assert world.restored == 0


def test_a_retained_prefix_is_given_up_for_those_who_run_once_they_share_it() -> None:
    for host_bytes in (0, 100):
        world = World(limits(running=2, kv_cells=256, step_tokens=64, retain_tokens=0), host_bytes=host_bytes)
        world.add([7] * 30, 1)
        while world.live:
            world.step()
        again = world.add([7] * 30 + [8], 5)
        for _ in range(4):
            world.step()
        assert again.cached_tokens == 30 and world.restored == 0
        # Nothing is left in the cache but what runs.
        assert list(world.kv) == [again.slot]
        world.finish()


def test_a_prefix_too_large_for_the_host_stays_until_others_run() -> None:
    world = World(limits(running=2, kv_cells=256, step_tokens=64, retain_tokens=0), host_bytes=50)
    for token, length in ((8, 40), (7, 60)):
        world.add([token] * length, 1)
        while world.live:
            world.step()
        world.tidy()
    assert [len(held) for held in world.kv.values()] == [60]
    again = world.add([7] * 60 + [9], 2)
    world.finish()
    assert again.cached_tokens == 60


def test_nobody_waits_for_two_copies_in_a_row() -> None:
    world = World(limits(running=4, kv_cells=256, step_tokens=64, retain_tokens=0), host_bytes=500)
    for token in (7, 8, 9):
        world.add([token] * 20, 1)
    while world.live:
        world.step()
    world.add([1] * 5, 20)
    copied = []
    for _ in range(8):
        copied.append(len(world.scheduler.schedule().evicted))
        world.step()
    assert sum(copied) == 3 and max(copied) == 1
    assert all(before + after < 2 for before, after in pairwise(copied))
    world.finish()


def test_a_prefix_that_stands_in_the_way_is_given_up() -> None:
    # The retained prefix fills the cache; the next prompt shares its head, so it is safe from eviction.
    world = World(limits(running=1, slots=2, kv_cells=45))
    for prompt, max_tokens in (([1] * 39, 6), ([1] * 16 + [2], 1)):
        world.add(prompt, max_tokens)
        for _ in range(200):
            world.step()
        assert world.scheduler.is_idle


def test_priority_overtakes_but_does_not_starve() -> None:
    world = World(limits(running=1, kv_cells=16))
    for key in range(12):
        world.add([100 + key], 1, priority=key >= 2)
    world.finish()
    order = [s.key for s in world.admitted]
    assert order[0] == 2
    assert order.index(0) <= 4 and order.index(1) <= 9
    assert [key for key in order if key >= 2] == list(range(2, 12))


def test_groups_with_different_adapters_take_turns() -> None:
    world = World(limits(running=3, kv_cells=256, turn_steps=3))
    served = []
    for adapters in ("", "a", "ab"):
        world.add([1, 2], 40, adapters=adapters)
    for _ in range(18):
        step = world.scheduler.schedule()
        assert step.turn is not None
        served.append("".join(use.path for use in step.turn))
        world.step()
    assert served == 2 * ([""] * 3 + ["a"] * 3 + ["ab"] * 3)
    world.finish()


def test_a_group_alone_is_never_interrupted() -> None:
    world = World(limits(turn_steps=1))
    first = world.add([1, 2], 20, adapters="a")
    for _ in range(10):
        world.step()
    assert first.generated == 10
    assert world.scheduler.switches == 1


def test_places_are_given_in_the_order_of_the_line_whatever_the_adapters() -> None:
    # Two places, and a stream of base requests that would keep both taken.
    world = World(limits(running=2, kv_cells=256))
    for key in range(8):
        world.add([100 + key], 2 + key % 3, adapters="a" if key == 3 else "")
    world.finish()
    assert [s.key for s in world.admitted] == list(range(8))


def test_right_drafts_save_steps_and_wrong_ones_cost_none() -> None:
    def steps(wrong: int | None) -> int:
        world = World(limits(kv_cells=256, draft_rows=8))
        world.add([1, 2], 41, drafts_wrong=wrong)
        count = 0
        while world.live:
            count += world.scheduler.schedule().computes
            world.step()
        return count

    # The first token comes with the prompt; then five a step: the row's own and four drafted ones.
    assert (steps(None), steps(1_000), steps(1)) == (41, 9, 41)


def test_drafts_share_the_rows_that_are_left() -> None:
    world = World(limits(running=3, kv_cells=256, draft_rows=8))
    for token in (10, 20, 30):
        world.add([token, token], 40, drafts_wrong=1_000)
    world.step()
    (planned,) = world.scheduler.schedule().decode
    assert [len(chunk.tokens) for chunk in planned.call.chunks] == [3, 3, 2]


def test_no_drafts_beside_exact_rows_unless_they_are_proven() -> None:
    for proven in (True, False):
        world = World(limits(running=2, kv_cells=256, draft_rows=8, exact_drafts=proven))
        world.add([1, 2], 40, exact=True, drafts_wrong=1_000)
        world.add([3, 4], 40, drafts_wrong=1_000)
        world.step()
        (planned,) = world.scheduler.schedule().decode
        assert (planned.call.rows > 2) is proven


def test_no_drafts_in_a_cache_that_is_nearly_full() -> None:
    world = World(limits(kv_cells=64, draft_rows=8))
    world.add([1] * 50, 14, drafts_wrong=1_000)
    rows = []
    while world.live:
        rows += [planned.call.rows for planned in world.scheduler.schedule().decode]
        world.step()
    assert max(rows) > 1
    assert rows[-1] == 1
    world.finish()


def test_a_long_prompt_of_one_group_does_not_stop_the_others() -> None:
    world = World(limits(running=2, kv_cells=512, step_tokens=16, stall_tokens=4, turn_steps=2))
    talker = world.add([1, 2], 60)
    world.step()
    world.add([3] * 200, 1, adapters="a")
    before = talker.generated
    for _ in range(20):
        world.step()
    assert talker.generated - before == 10
    world.finish()


@pytest.mark.parametrize(
    ("token", "source", "max_tokens", "reason"),
    [
        (3, Source.SAMPLED, 9, FinishReason.STOP),
        (3, Source.SAMPLED, 1, FinishReason.STOP),
        # A close token that the gate forces is no end of sequence, even where its id is one.
        (3, Source.FORCED, 9, None),
        (3, Source.FORCED, 1, FinishReason.LENGTH),
        (4, Source.SAMPLED, 9, None),
        (4, Source.SAMPLED, 1, FinishReason.LENGTH),
    ],
)
def test_why_a_sequence_ends(
    token: int, source: Source, max_tokens: int, reason: FinishReason | None
) -> None:
    scheduler = Scheduler(limits())
    request = GenerationRequest((1, 2), max_tokens, GREEDY, seed=0, eos_ids=frozenset({3}))
    sequence = Sequence(0, request, None, 0.0)
    scheduler.add(sequence)
    step = scheduler.schedule()
    scheduler.begin(step, 5.0)
    scheduler.apply(step.prefill[0])
    assert scheduler.accept(sequence, Pick(token, source, None), 6.0) is reason
    assert sequence.tokens == [1, 2, token]
    assert (sequence.admitted, sequence.first_token) == (5.0, 6.0)
