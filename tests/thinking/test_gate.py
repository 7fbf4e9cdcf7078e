"""The decode-time gate: each rule by example, then all of them against a naive model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kiln.core.budgets import Outcome, Trigger
from kiln.core.tokens import Source
from kiln.thinking.gate import CloseSequence, GateLimits, ThinkingGate, stop_overlaps_close

S, F = Source.SAMPLED, Source.FORCED
TAG = b"</think>"

# A vocabulary in which the tag is three tokens (1, 2, 3), and can be written in other ways.
PIECES = [
    b"x",  # 0
    b"</",  # 1
    b"think",  # 2
    b">",  # 3
    b">\n\n",  # 4
    b"<",  # 5
    b"/think",  # 6
    b"</think>",  # 7
    b"\n</",  # 8
    b"",  # 9
    b"y",  # 10
    b"x</think>\n",  # 11
]
X, OPEN, WORD, END, END_NEWLINES, LESS, SLASH_WORD, WHOLE, NEWLINE_OPEN, EMPTY, Y, MERGED = range(12)
IDS = (OPEN, WORD, END)
CLOSE = CloseSequence.of(IDS, TAG)


def gate(
    tokens: int | None = None,
    seconds: float | None = None,
    completion: int | None = None,
    close: CloseSequence = CLOSE,
) -> ThinkingGate:
    return ThinkingGate(close, GateLimits(tokens, seconds, completion), PIECES)


def feed(gate: ThinkingGate, *sampled: int, now: float = 0.0) -> list[tuple[int, Source]]:
    return [gate.accept(token, now) for token in sampled]


def sampled(*ids: int) -> list[tuple[int, Source]]:
    return [(token, S) for token in ids]


def forced(*ids: int) -> list[tuple[int, Source]]:
    return [(token, F) for token in ids]


# Token limit.


def test_budget_zero_closes_before_the_first_thought() -> None:
    g = gate(tokens=0)
    assert feed(g, X, X, X, Y) == forced(*IDS) + sampled(Y)
    assert g.outcome() == Outcome(Trigger.TOKENS, True, 0, 0)


def test_exactly_n_tokens_are_thought() -> None:
    g = gate(tokens=2)
    assert feed(g, X, Y, X, X, X, X) == sampled(X, Y) + forced(*IDS) + sampled(X)
    assert g.outcome() == Outcome(Trigger.TOKENS, True, 2, 0)


def test_a_natural_close_on_the_boundary_stays_sampled() -> None:
    g = gate(tokens=1)
    assert feed(g, X, *IDS, Y) == sampled(X, *IDS, Y)
    assert g.outcome() == Outcome(None, True, 1, 0)


def test_a_natural_close_wins_over_a_budget_of_zero() -> None:
    g = gate(tokens=0)
    assert feed(g, *IDS) == sampled(*IDS)
    assert g.outcome() == Outcome(None, True, 0, 0)


def test_a_close_that_fails_on_the_boundary_is_finished_by_force() -> None:
    g = gate(tokens=1)
    assert feed(g, X, OPEN, WORD, X, Y) == sampled(X, OPEN, WORD) + forced(END) + sampled(Y)
    assert g.outcome() == Outcome(Trigger.TOKENS, True, 1, 0)


def test_a_failed_partial_match_cannot_run_past_the_limit() -> None:
    # OPEN begins a close within the limit of 2; the Y after it would make both of them thinking tokens.
    g = gate(tokens=2)
    assert feed(g, X, OPEN, Y, X, X) == sampled(X, OPEN) + forced(WORD, END) + sampled(X)
    assert g.outcome() == Outcome(Trigger.TOKENS, True, 1, 0)


def test_a_failed_partial_match_within_the_limit_goes_on() -> None:
    g = gate(tokens=3)
    assert feed(g, X, OPEN, Y, X, X, X) == sampled(X, OPEN, Y) + forced(*IDS)
    assert g.outcome() == Outcome(Trigger.TOKENS, True, 3, 0)


def test_progress_falls_back_to_a_shorter_prefix() -> None:
    # After a a, another a keeps two of the close's three tokens matched and adds one to the thinking.
    close = CloseSequence.of((X, X, Y), b"xxy")
    g = ThinkingGate(close, GateLimits(max_tokens=1), PIECES)
    assert feed(g, X, X, X, X, Y) == [*sampled(X, X, X), (Y, F), (Y, S)]
    assert g.outcome() == Outcome(Trigger.TOKENS, True, 1, 0)


def test_without_limits_the_gate_only_watches() -> None:
    g = gate()
    assert feed(g, X, OPEN, X, Y, *IDS, X) == sampled(X, OPEN, X, Y, *IDS, X)
    assert g.is_done
    assert g.outcome() == Outcome(None, True, 4, 0)


def test_ended_before_any_limit() -> None:
    g = gate(tokens=10)
    feed(g, X, Y, X)
    assert not g.is_done
    assert g.outcome() == Outcome(None, False, 3, 0)


def test_nothing_generated() -> None:
    assert gate(tokens=10).outcome() == Outcome(None, False, 0, 0)


def test_ended_while_closing() -> None:
    g = gate(tokens=1)
    feed(g, X, X, X)
    assert g.is_forcing
    assert g.outcome() == Outcome(Trigger.TOKENS, False, 1, 0)


def test_next_forced_announces_the_replacement() -> None:
    g = gate(tokens=1)
    assert g.next_forced is None
    feed(g, X)
    assert g.next_forced is None  # the next candidate may still close by itself
    feed(g, X)
    assert g.next_forced == WORD
    feed(g, WORD, END)
    assert g.next_forced is None
    assert g.is_done and not g.is_forcing


def test_a_candidate_that_fits_is_forced_all_the_same_once_forcing_began() -> None:
    assert feed(gate(tokens=0), X, WORD, END) == forced(*IDS)


# Time limit.


def test_the_clock_starts_at_the_first_candidate() -> None:
    g = gate(seconds=2.0)
    out = [g.accept(X, now) for now in (100.0, 101.0, 101.75, 102.0, 103.0, 104.0, 105.0)]
    assert out == sampled(X, X, X) + forced(*IDS) + sampled(X)
    assert g.outcome() == Outcome(Trigger.TIME, True, 3, 2000)


def test_time_zero_closes_at_the_first_candidate() -> None:
    g = gate(seconds=0.0)
    assert feed(g, X, X, X, X, now=7.0) == forced(*IDS) + sampled(X)
    assert g.outcome() == Outcome(Trigger.TIME, True, 0, 0)


def test_time_zero_leaves_a_natural_close_alone() -> None:
    g = gate(seconds=0.0)
    assert feed(g, *IDS, X) == sampled(*IDS, X)
    assert g.outcome() == Outcome(None, True, 0, 0)


def test_a_natural_close_past_the_time_limit_is_finished_by_force_when_it_fails() -> None:
    g = gate(seconds=1.0)
    g.accept(X, 0.0)
    assert feed(g, OPEN, X, X, X, now=5.0) == [(OPEN, S), *forced(WORD, END), (X, S)]
    assert g.outcome() == Outcome(Trigger.TIME, True, 1, 5000)


def test_tokens_are_reported_when_both_limits_meet() -> None:
    g = gate(tokens=1, seconds=1.0)
    g.accept(X, 0.0)
    assert g.accept(X, 1.0) == (OPEN, F)
    assert g.outcome().trigger is Trigger.TOKENS


def test_time_is_reported_before_the_reservation() -> None:
    g = gate(seconds=1.0, completion=4)
    g.accept(X, 0.0)
    g.accept(X, 1.0)
    assert g.outcome().trigger is Trigger.TIME


def test_the_first_limit_reached_wins() -> None:
    g = gate(tokens=3, seconds=1.0)
    g.accept(X, 0.0)
    g.accept(X, 1.0)
    assert g.outcome().trigger is Trigger.TIME


def test_thinking_time_ends_where_the_close_begins() -> None:
    g = gate(tokens=1)
    for now in (0.0, 0.25, 9.0, 10.0, 11.0):
        g.accept(X, now)
    assert g.outcome().thinking_time_ms == 250


def test_thinking_time_of_a_natural_close_runs_to_its_end() -> None:
    g = gate(tokens=9)
    for token, now in zip((X, *IDS, X), (1.0, 1.25, 1.5, 1.75, 9.0), strict=True):
        g.accept(token, now)
    assert g.outcome().thinking_time_ms == 750


def test_thinking_time_of_an_unclosed_end_is_that_of_the_last_candidate() -> None:
    g = gate(tokens=9)
    g.accept(X, 3.0)
    g.accept(X, 3.5)
    assert g.outcome().thinking_time_ms == 500


# Reservation of completion slots.


@pytest.mark.parametrize("completion", [3, 4, 9])
def test_the_whole_close_fits_the_completion(completion: int) -> None:
    g = gate(tokens=100, completion=completion)
    out = feed(g, *[X] * completion)
    assert out == sampled(*[X] * (completion - 3)) + forced(*IDS)
    assert g.outcome() == Outcome(Trigger.MAX_TOKENS, True, completion - 3, 0)


def test_a_natural_close_may_use_the_reserved_slots() -> None:
    g = gate(tokens=100, completion=5)
    assert feed(g, X, X, *IDS) == sampled(X, X, *IDS)
    assert g.outcome() == Outcome(None, True, 2, 0)


def test_a_natural_close_that_fails_in_the_reserved_slots_still_fits() -> None:
    g = gate(tokens=100, completion=5)
    assert feed(g, X, X, OPEN, X, X) == sampled(X, X, OPEN) + forced(WORD, END)
    assert g.outcome() == Outcome(Trigger.MAX_TOKENS, True, 2, 0)


def test_tokens_are_reported_before_the_reservation() -> None:
    g = gate(tokens=2, completion=5)
    feed(g, X, X, X)
    assert g.outcome().trigger is Trigger.TOKENS


# Closes that are seen on bytes only.


@pytest.mark.parametrize(
    ("stream", "thinking"),
    [
        ((X, OPEN, WORD, END_NEWLINES), 1),
        ((X, X, LESS, SLASH_WORD, END), 2),
        ((X, LESS, SLASH_WORD, END_NEWLINES), 1),
        ((WHOLE,), 0),
        ((X, WHOLE), 1),
        ((X, X, NEWLINE_OPEN, WORD, END), 3),
        ((X, EMPTY, X, EMPTY, LESS, EMPTY, SLASH_WORD, END), 3),
        ((OPEN, OPEN, WORD, END_NEWLINES), 1),
    ],
)
def test_a_tag_written_with_other_tokens_closes(stream: tuple[int, ...], thinking: int) -> None:
    g = gate(tokens=8)
    assert feed(g, *stream, *[X] * 20) == sampled(*stream, *[X] * 20)
    assert g.outcome() == Outcome(None, True, thinking, 0)


def test_a_merged_last_piece_on_the_boundary_is_a_natural_close() -> None:
    g = gate(tokens=1)
    assert feed(g, X, OPEN, WORD, END_NEWLINES, X) == sampled(X, OPEN, WORD, END_NEWLINES, X)
    assert g.outcome() == Outcome(None, True, 1, 0)


def test_a_merged_last_piece_past_the_time_limit_is_a_natural_close() -> None:
    g = gate(seconds=0.0)
    assert feed(g, OPEN, WORD, END_NEWLINES, X) == sampled(OPEN, WORD, END_NEWLINES, X)
    assert g.outcome() == Outcome(None, True, 0, 0)


def test_a_tag_seen_on_bytes_far_into_the_stream() -> None:
    g = gate()
    feed(g, *[X] * 1000, LESS, SLASH_WORD)
    assert not g.is_done
    feed(g, END)
    assert g.is_done
    assert g.outcome().thinking_tokens == 1000


def test_a_tag_with_a_gap_is_no_close() -> None:
    g = gate()
    feed(g, LESS, X, SLASH_WORD, END, OPEN, X, WORD, END)
    assert not g.is_done


def test_a_tag_inside_one_token_does_not_pass_the_limit() -> None:
    # One token holds a thought and the whole tag: it may not stay when the thought exceeds the limit.
    g = ThinkingGate(
        CloseSequence.of((1, 2), b"</think>"), GateLimits(max_tokens=0), [b"x</think>", b"</", b"think>"]
    )
    g.accept(0, 0.0)
    assert g.outcome().thinking_tokens == 0


def test_an_end_inside_a_natural_close_does_not_report_more_than_the_limit() -> None:
    g = ThinkingGate(
        CloseSequence.of((1, 2), b"</think>"), GateLimits(max_tokens=0), [b"x", b"</", b"think>"]
    )
    g.accept(1, 0.0)  # the close has begun; then the client goes away
    assert g.outcome().thinking_tokens == 0


# Skipping on request.


def test_skip_closes_by_force_and_stays_untriggered() -> None:
    g = gate()
    feed(g, X, X)
    assert g.skip()
    assert feed(g, X, X, X, Y, now=2.0) == forced(*IDS) + sampled(Y)
    assert g.outcome() == Outcome(None, True, 2, 2000, interrupted=True)


def test_skip_before_the_first_candidate() -> None:
    g = gate()
    assert g.skip()
    assert feed(g, X, X, X, Y) == forced(*IDS) + sampled(Y)
    assert g.outcome() == Outcome(None, True, 0, 0, interrupted=True)


def test_skip_completes_a_partial_match() -> None:
    g = gate()
    feed(g, X, OPEN)
    assert g.skip()
    assert feed(g, X, X, X) == forced(WORD, END) + sampled(X)
    assert g.outcome() == Outcome(None, True, 1, 0, interrupted=True)


def test_skip_leaves_a_natural_close_alone() -> None:
    g = gate()
    feed(g, X)
    assert g.skip()
    assert feed(g, *IDS, X) == sampled(*IDS, X)
    assert g.outcome() == Outcome(None, True, 1, 0, interrupted=False)


def test_skip_after_the_close_does_nothing() -> None:
    g = gate()
    feed(g, X, *IDS)
    assert not g.skip()
    assert feed(g, X, Y) == sampled(X, Y)
    assert g.outcome() == Outcome(None, True, 1, 0)


def test_skip_while_forcing_does_nothing() -> None:
    g = gate(tokens=0)
    feed(g, X)
    assert not g.skip()
    assert feed(g, X, X, X) == forced(WORD, END) + sampled(X)
    assert g.outcome() == Outcome(Trigger.TOKENS, True, 0, 0)


def test_skip_twice_is_skip_once() -> None:
    g = gate()
    assert g.skip() and g.skip()
    assert feed(g, X, X, X, X) == forced(*IDS) + sampled(X)


def test_a_second_close_is_not_watched() -> None:
    g = gate(tokens=0, seconds=0.0, completion=3)
    stream = [*IDS, X, *IDS, OPEN, X]
    assert feed(g, *stream, now=3.0) == sampled(*stream)


# Construction.


@pytest.mark.parametrize(("ids", "tag"), [((), TAG), ((1,), b"")])
def test_a_close_sequence_is_not_empty(ids: tuple[int, ...], tag: bytes) -> None:
    with pytest.raises(ValueError):
        CloseSequence.of(ids, tag)


# The naive model: every question is answered from the whole history.


@dataclass
class Expected:
    out: list[tuple[int, Source]] = field(default_factory=list)
    trigger: Trigger | None = None
    interrupted: bool = False
    closed: bool = False
    thinking: int | None = None
    ended: float | None = None


def longest(ids: Sequence[int], close: Sequence[int]) -> int:
    """The longest prefix of `close` that `ids` end with."""
    lengths = range(min(len(ids), len(close)) + 1)
    return max(k for k in lengths if list(ids[len(ids) - k :]) == list(close[:k]))


def tokens_before_tag(ids: Sequence[int], pieces: Sequence[bytes], tag: bytes) -> int | None:
    """How many tokens begin before the tag's first byte; None if the tag is not in the text."""
    start = b"".join(pieces[t] for t in ids).find(tag)
    if start < 0:
        return None
    begins = itertools.accumulate((len(pieces[t]) for t in ids[:-1]), initial=0)
    return sum(begin < start for begin in begins)


def naive(case: Case) -> Expected:
    e = Expected()
    close, limits = case.ids, case.limits
    rest: list[int] | None = None
    began = case.times[0] if case.times else 0.0
    for i, (token, now) in enumerate(zip(case.stream, case.times, strict=True)):
        if e.closed:
            e.out.append((token, S))
            continue
        before = [t for t, _ in e.out]
        if rest is None:
            taken = [*before, token]
            after, progress = longest(taken, close), longest(before, close)
            thinking = len(taken) - after
            by_bytes = tokens_before_tag(taken, case.pieces, case.tag)
            natural = after == len(close) or by_bytes is not None
            if after != len(close) and by_bytes is not None:
                thinking = by_bytes
            if limits.max_tokens is not None and thinking > limits.max_tokens:
                natural = False
            trigger = None
            goes_on = token == close[progress]
            if natural:
                pass
            elif limits.max_tokens is not None and thinking > limits.max_tokens:
                trigger = Trigger.TOKENS
            elif limits.max_time_s is not None and now - began >= limits.max_time_s and not goes_on:
                trigger = Trigger.TIME
            elif (
                limits.completion_tokens is not None
                and len(before) + len(close) >= limits.completion_tokens
                and not goes_on
            ):
                trigger = Trigger.MAX_TOKENS
            skipped = case.skip_at is not None and i >= case.skip_at and not goes_on and not natural
            if trigger is None and not skipped:
                e.out.append((token, S))
                if natural:
                    e.closed, e.thinking, e.ended = True, thinking, now
                continue
            e.trigger, e.interrupted = trigger, trigger is None
            e.thinking, e.ended = len(before) - progress, now
            rest = list(close[progress:])
        e.out.append((rest.pop(0), F))
        e.closed = not rest
    if e.thinking is None:
        ids = [t for t, _ in e.out]
        e.thinking = len(ids) - longest(ids, close)
    return e


@dataclass
class Case:
    ids: tuple[int, ...]
    pieces: list[bytes]
    tag: bytes
    limits: GateLimits
    stream: list[int]
    times: list[float]
    skip_at: int | None

    def run(self) -> tuple[list[tuple[int, Source]], ThinkingGate]:
        g = ThinkingGate(CloseSequence.of(self.ids, self.tag), self.limits, self.pieces)
        out = []
        for i, (token, now) in enumerate(zip(self.stream, self.times, strict=True)):
            if i == self.skip_at:
                g.skip()
            announced = g.next_forced
            out.append(g.accept(token, now))
            if announced is not None:
                assert out[-1] == (announced, F)
        return out, g


@st.composite
def cases(draw: st.DrawFn, *, on_bytes: bool = False) -> Case:
    if on_bytes:
        alphabet = len(PIECES)
        ids, pieces, tag = draw(st.sampled_from([(IDS, PIECES, TAG), ((WHOLE,), PIECES, TAG)]))
        # Runs of a tag's pieces are more likely than chance would make them.
        runs = st.sampled_from(
            [
                IDS,
                (OPEN, WORD, END_NEWLINES),
                (LESS, SLASH_WORD),
                (LESS, SLASH_WORD, END),
                (NEWLINE_OPEN, WORD, END),
            ]
        )
        token = st.integers(0, alphabet - 1)
        parts = draw(st.lists(token.map(lambda t: (t,)) | runs, max_size=15))
        stream = [t for part in parts for t in part]
    else:
        alphabet = draw(st.integers(1, 3))
        ids = tuple(draw(st.lists(st.integers(0, alphabet - 1), min_size=1, max_size=5)))
        pieces = [bytes([97 + t]) for t in range(alphabet)]
        tag = b"".join(pieces[t] for t in ids)
        stream = draw(st.lists(st.integers(0, alphabet - 1), max_size=30))
    steps = draw(st.lists(st.sampled_from([0.0, 0.125, 0.5]), min_size=len(stream), max_size=len(stream)))
    start = draw(st.sampled_from([0.0, 1024.0]))
    limits = GateLimits(
        max_tokens=draw(st.none() | st.integers(0, 8)),
        max_time_s=draw(st.none() | st.sampled_from([0.0, 0.125, 1.0, 3.0])),
        completion_tokens=draw(st.none() | st.integers(len(ids), len(ids) + 20)),
    )
    if limits.completion_tokens is not None:
        stream = stream[: limits.completion_tokens]
    times = [start + t for t in itertools.accumulate(steps)][: len(stream)]
    return Case(ids, pieces, tag, limits, stream, times, draw(st.none() | st.integers(0, 20)))


def check_against_model(case: Case) -> None:
    out, g = case.run()
    expected, outcome = naive(case), g.outcome()
    assert out == expected.out
    assert outcome.trigger is expected.trigger
    assert outcome.interrupted is expected.interrupted
    assert outcome.closed is g.is_done is expected.closed
    assert outcome.thinking_tokens == expected.thinking
    if case.limits.max_tokens is not None:
        assert outcome.thinking_tokens <= case.limits.max_tokens
    if case.times:
        ended = expected.ended if expected.ended is not None else case.times[-1]
        assert outcome.thinking_time_ms == int((ended - case.times[0]) * 1000)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_the_gate_does_what_the_naive_model_does(case: Case) -> None:
    check_against_model(case)


@settings(max_examples=150, deadline=None)
@given(cases(on_bytes=True))
def test_the_gate_does_what_the_naive_model_does_on_bytes(case: Case) -> None:
    check_against_model(case)


@settings(max_examples=150, deadline=None)
@given(cases())
@example(Case((0, 0, 1), [b"a", b"b"], b"aab", GateLimits(max_tokens=0), [0, 0, 0, 0], [0.0] * 4, None))
def test_never_more_than_n_thinking_tokens_before_the_close_begins(case: Case) -> None:
    out, g = case.run()
    ids = [token for token, _ in out]
    limit = case.limits.max_tokens
    if limit is None:
        return
    for end in range(1, len(ids) + 1):
        # Whatever comes next, the close has begun or at most N tokens were thought.
        assert end - longest(ids[:end], case.ids) <= limit
        if longest(ids[:end], case.ids) == len(case.ids):
            assert g.outcome().thinking_tokens == end - len(case.ids)
            break


@settings(max_examples=150, deadline=None)
@given(cases())
def test_forced_tokens_are_one_suffix_of_the_close(case: Case) -> None:
    out, g = case.run()
    places = [i for i, (_, source) in enumerate(out) if source is F]
    if not places:
        return
    assert places == list(range(places[0], places[-1] + 1))
    ids = [token for token, _ in out]
    progress = longest(ids[: places[0]], case.ids)
    written = [ids[i] for i in places]
    whole = list(case.ids[progress:])
    assert written == whole[: len(written)]
    if g.is_done:
        assert written == whole
        # The close stands there whole, and nowhere before.
        end = places[-1] + 1
        assert tuple(ids[end - len(case.ids) : end]) == case.ids
    else:
        assert places[-1] == len(out) - 1


@settings(max_examples=150, deadline=None)
@given(cases())
def test_after_the_close_everything_is_as_sampled(case: Case) -> None:
    out, _ = case.run()
    ids = [token for token, _ in out]
    ends = [end for end in range(len(ids) + 1) if longest(ids[:end], case.ids) == len(case.ids)]
    if ends:
        assert out[ends[0] :] == sampled(*case.stream[ends[0] :])


@settings(max_examples=80, deadline=None)
@given(cases())
def test_a_full_completion_holds_the_whole_close(case: Case) -> None:
    limit = case.limits.completion_tokens
    if limit is None or not case.stream:
        return
    # Run on to the completion's end, always with the same token.
    case.stream += [case.stream[-1]] * (limit - len(case.stream))
    case.times += [case.times[-1]] * (limit - len(case.times))
    _, g = case.run()
    assert g.outcome().closed


@settings(max_examples=80, deadline=None)
@given(cases())
def test_without_limits_and_skip_nothing_changes(case: Case) -> None:
    case.limits, case.skip_at = GateLimits(), None
    out, g = case.run()
    assert out == sampled(*case.stream)
    assert g.outcome().trigger is None and not g.outcome().interrupted


@settings(max_examples=80, deadline=None)
@given(cases(), st.lists(st.integers(0, 0), max_size=5))
def test_there_is_exactly_one_outcome(case: Case, more: list[int]) -> None:
    _, g = case.run()
    outcome = g.outcome()
    assert not (outcome.trigger is not None and outcome.interrupted)
    if outcome.closed:
        feed(g, *more, now=9999.0)
        g.skip()
        feed(g, *more, now=9999.0)
        assert g.outcome() == outcome


@given(st.integers(1, 3).flatmap(lambda n: st.tuples(*[st.lists(st.integers(0, n - 1), min_size=1)] * 2)))
def test_progress_is_the_longest_prefix_that_the_stream_ends_with(pair: tuple[list[int], list[int]]) -> None:
    ids, stream = pair[0][:5], pair[1]
    close = CloseSequence.of(ids, b"tag")
    progress = 0
    for end in range(1, len(stream) + 1):
        progress = close.advance(progress, stream[end - 1])
        assert progress == longest(stream[:end], ids)


# Stop strings.


def overlaps(stop: str, tag: str) -> bool:
    """Whether the two can lie on one another, in any position, without a contradiction."""
    for offset in range(1 - len(stop), len(tag)):
        first, last = max(0, offset), min(len(tag), offset + len(stop))
        if tag[first:last] == stop[first - offset : last - offset]:
            return True
    return False


@settings(max_examples=200)
@given(st.text("<a>", max_size=6), st.text("<a>", min_size=1, max_size=6))
def test_stop_overlap_is_what_the_definition_says(stop: str, tag: str) -> None:
    assert stop_overlaps_close(stop, tag) is (stop != "" and overlaps(stop, tag))


@pytest.mark.parametrize(
    "stop", ["</think>", "think", ">", "a</think>b", "</think>\n\n", "so <", "think</", "k>a", ">\n\n", "/"]
)
def test_stops_that_touch_the_close(stop: str) -> None:
    assert stop_overlaps_close(stop, "</think>")


@pytest.mark.parametrize("stop", ["", "\n\n", "END", "thinking", "<think", "Think", "\n</ think"])
def test_stops_that_do_not(stop: str) -> None:
    assert not stop_overlaps_close(stop, "</think>")
