from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiln.text.reasoning import ReasoningTags
from kiln.text.scanner import Channel, Scanner, Span, ToolMarkers

TAGS = ReasoningTags("<think>", "</think>")
TOOLS = ToolMarkers("<tool_call>", "</tool_call>")
ENDED_BY_TURN = ToolMarkers("<tool_call>", "", starts=("{", "a"), ends_with_turn=True, holds_json=True)
R, C, T = Channel.REASONING, Channel.CONTENT, Channel.TOOL
NO_STOPS: tuple[str, ...] = ()


def make(
    *, in_reasoning: bool = True, stops: Sequence[str] = NO_STOPS, tools: ToolMarkers | None = TOOLS
) -> Scanner:
    return Scanner(tags=TAGS, in_reasoning=in_reasoning, stops=stops, tools=tools)


def join(spans: Iterable[Span]) -> list[tuple[Channel, str]]:
    """Neighbours of one channel as one; tool calls stay apart."""
    out: list[tuple[Channel, str]] = []
    for span in spans:
        if out and out[-1][0] is span.channel and span.channel is not T:
            out[-1] = (span.channel, out[-1][1] + span.text)
        else:
            out.append((span.channel, span.text))
    return out


def scan(scanner: Scanner, *chunks: str, turn_ended: bool = False) -> list[tuple[Channel, str]]:
    spans = [span for chunk in chunks for span in scanner.feed(chunk)]
    return join([*spans, *scanner.finish(turn_ended=turn_ended)])


def cut(text: str, places: Iterable[int]) -> list[str]:
    bounds = [0, *sorted({p % (len(text) + 1) for p in places}), len(text)]
    return [text[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


def reference(
    text: str, *, in_reasoning: bool, stops: Sequence[str], tools: ToolMarkers | None
) -> tuple[list[tuple[Channel, str]], str | None]:
    """The rules once more, plainly, on the whole text."""
    out: list[Span] = []
    state = "reasoning" if in_reasoning else "content"
    rest = text.lstrip("\r\n") if in_reasoning else text
    while True:
        if state == "reasoning":
            body, close, rest = rest.partition(TAGS.close)
            out.append(Span(R, body.rstrip("\r\n") if close else body))
            if not close:
                return join(s for s in out if s.text or s.channel is T), None
            rest = re.sub(r"\A(?:[\r\n]|</think>)*", "", rest)
            state = "content"
            continue
        wanted = [TAGS.open, *([tools.open] if tools else []), *stops]
        found = [(rest.find(w), -len(w), w) for w in wanted if w in rest]
        if not found:
            out.append(Span(C, rest))
            return join(s for s in out if s.text or s.channel is T), None
        at, _, marker = min(found)
        body, rest_after = rest[:at], rest[at + len(marker) :]
        if marker in stops:
            out.append(Span(C, body))
            return join(s for s in out if s.text or s.channel is T), marker
        if marker == TAGS.open:
            out.append(Span(C, body))
            rest, state = rest_after.lstrip("\r\n"), "reasoning"
            continue
        call, close, after = rest_after.partition(TOOLS.close)
        if not close:
            out.append(Span(C, rest))
            return join(s for s in out if s.text or s.channel is T), None
        out += [Span(C, body.rstrip("\r\n")), Span(T, call)]
        rest = after.lstrip("\r\n")


SCRAPS = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "\n", "\r\n", "<", "</", "</thi", "<tool_c", ">"]
    + ["a", "b", "ab", "STOP", "STO", "{}", " ", "é", "x\ny"]
)
TEXTS = st.lists(SCRAPS, max_size=20).map("".join)
STOPS = st.lists(
    st.sampled_from(["STOP", "ab", "b", "aba", "\n\n", "x\ny", "O", "<", "<t", "k>", "a<think>", "</think>"]),
    max_size=3,
)


@settings(max_examples=600, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 200)), st.booleans(), STOPS, st.booleans())
def test_cuts_make_no_difference_and_the_rules_hold(
    text: str, places: list[int], in_reasoning: bool, stops: list[str], with_tools: bool
) -> None:
    tools = TOOLS if with_tools else None
    wanted, stopped = reference(text, in_reasoning=in_reasoning, stops=stops, tools=tools)
    for chunks in ([text], cut(text, places), list(text)):
        scanner = make(in_reasoning=in_reasoning, stops=stops, tools=tools)
        assert scan(scanner, *chunks) == wanted
        assert scanner.stopped == stopped


@settings(max_examples=1000, deadline=None)
@given(
    TEXTS,
    st.one_of(st.just(range(200)), st.lists(st.integers(0, 200))),
    st.fixed_dictionaries(
        {
            "in_reasoning": st.booleans(),
            "tools": st.sampled_from([TOOLS, ENDED_BY_TURN]),
            "silent": st.sampled_from([(), ("<i>",)]),
            "live_calls": st.booleans(),
            "calls_lead": st.booleans(),
            "reopens": st.booleans(),
        }
    ),
)
def test_cuts_make_no_difference_whatever_the_options(
    text: str, places: Sequence[int], options: dict[str, Any]
) -> None:
    pieces = cut(text, places)
    found, whole = (scan(Scanner(tags=TAGS, **options), *t, turn_ended=True) for t in (pieces, [text]))
    assert found == whole


def test_a_marker_inside_an_answer_is_text_where_calls_lead() -> None:
    text = '{"a": "<tool_call>b</tool_call>"}'
    options: dict[str, Any] = {"tags": TAGS, "in_reasoning": False, "tools": TOOLS, "calls_lead": True}
    assert scan(Scanner(**options), *text) == [(C, text)]


@settings(max_examples=300, deadline=None)
@given(st.text("ab<\n"), st.lists(st.text("ab<\n", min_size=1, max_size=6), min_size=1, max_size=3))
def test_only_a_possible_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    scanner = Scanner(tags=None, in_reasoning=False, stops=stops)
    shown = ""
    for end, char in enumerate(text, 1):
        shown += "".join(span.text for span in scanner.feed(char))
        if scanner.stopped is not None:
            assert scanner.stopped in text
            return
        held = text[:end].removeprefix(shown)
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_a_tag_inside_a_chunk_splits_it() -> None:
    assert make().feed("secret</think>Hello") == [Span(R, "secret"), Span(C, "Hello")]


def test_text_without_tags_is_content() -> None:
    scanner = Scanner(tags=None, in_reasoning=True)
    assert not scanner.in_reasoning
    assert scan(scanner, "a</think>\n") == [(C, "a</think>\n")]


def test_template_newlines_belong_to_no_channel() -> None:
    chunks = ("\n\nthought\n\n", "</think>\n", "\r\n", "answer\n")
    assert scan(make(), *chunks) == [(R, "thought"), (C, "answer\n")]


def test_other_whitespace_belongs_to_the_text() -> None:
    assert scan(make(), " a \n</think>\n  b") == [(R, " a "), (C, "  b")]


def test_an_empty_block_gives_no_span() -> None:
    assert scan(make(), "\n\n</think>\n\n", "Hi") == [(C, "Hi")]


def test_newlines_held_in_an_unclosed_block_are_flushed() -> None:
    scanner = make()
    assert scanner.feed("a\n") == [Span(R, "a")]
    assert scanner.finish() == [Span(R, "\n")]
    assert scan(make(), "a\n</thi") == [(R, "a\n</thi")]


def test_a_false_start_of_a_tag_is_released_at_once() -> None:
    scanner = make()
    assert scanner.feed("x</thi") == [Span(R, "x")]
    assert scanner.feed("s") == [Span(R, "</this")]


def test_a_later_open_tag_begins_reasoning() -> None:
    scanner = make(in_reasoning=False)
    assert scan(scanner, "A\n<think>\nb\n</think>\n\nC") == [(C, "A\n"), (R, "b"), (C, "C")]
    scanner = make(in_reasoning=False)
    scanner.feed("<think>")
    assert scanner.in_reasoning


def test_an_open_tag_in_reasoning_is_text() -> None:
    assert scan(make(), "a<think>b</think>c") == [(R, "a<think>b"), (C, "c")]


def test_a_second_close_tag_is_swallowed_only_right_behind_the_first() -> None:
    assert scan(make(), "a</think>\n</thi", "nk></think>\n\nb") == [(R, "a"), (C, "b")]
    assert scan(make(), "a</think>b</think>") == [(R, "a"), (C, "b</think>")]
    assert scan(make(), "a</think></thi") == [(R, "a"), (C, "</thi")]


def test_an_unopened_close_tag_is_text() -> None:
    assert scan(make(in_reasoning=False), "</think>a") == [(C, "</think>a")]


def test_stop_strings_act_on_content_only() -> None:
    scanner = make(stops=["END"])
    assert scan(scanner, "END</think>aEND", "b") == [(R, "END"), (C, "a")]
    assert scanner.stopped == "END"
    scanner = make(in_reasoning=False, stops=["END"])
    assert scan(scanner, "<tool_call>END</tool_call>") == [(T, "END")]
    assert scanner.stopped is None


def test_stop_strings_do_not_see_template_newlines() -> None:
    scanner = make(stops=["\n\n"])
    assert scan(scanner, "a\n\n</think>\n\nb\n\nc") == [(R, "a"), (C, "b")]
    assert scanner.stopped == "\n\n"


def test_newlines_before_a_stop_string_are_content() -> None:
    assert scan(make(in_reasoning=False, stops=["END"]), "a\nEND") == [(C, "a\n")]


@pytest.mark.parametrize(
    ("stops", "text", "stopped", "content"),
    [
        (["bc", "abcd"], "xabcd", "abcd", "x"),
        (["bc", "abcd"], "xabce", "bc", "xa"),
        (["ab", "abc"], "abc", "abc", ""),
        (["ab", "abc"], "abd", "ab", ""),
        (["ab", "abc"], "ab", "ab", ""),
        (["<tool_call>"], "x<tool_call>{}", "<tool_call>", "x"),
        (["aab"], "aaab", "aab", "a"),
        ([""], "a", None, "a"),
    ],
)
def test_the_leftmost_and_longest_stop_string_wins(
    stops: list[str], text: str, stopped: str | None, content: str
) -> None:
    for chunks in ([text], list(text)):
        scanner = make(in_reasoning=False, stops=stops)
        assert "".join(t for _, t in scan(scanner, *chunks)) == content
        assert scanner.stopped == stopped


def test_a_tool_call_is_one_span() -> None:
    scanner = make(in_reasoning=False)
    assert scanner.feed("Look:\n\n<tool_call>\n{") == [Span(C, "Look:")]
    assert scanner.feed("}\n</tool_") == []
    marks = ("<tool_call>", "</tool_call>")
    found = scanner.feed("call>\n<tool_call>2</tool_call>\n")
    assert found == [Span(T, "\n{}\n", *marks), Span(T, "2", *marks)]
    assert scanner.finish() == []


def test_an_unclosed_tool_call_is_content() -> None:
    text = "a\n<tool_call>\n{</tool"
    assert scan(make(in_reasoning=False), *text) == [(C, text)]


def test_a_tool_call_in_reasoning_is_reasoning() -> None:
    assert scan(make(), "<tool_call>{}</tool_call></think>a") == [(R, "<tool_call>{}</tool_call>"), (C, "a")]


def test_channel_tags() -> None:
    tags = ReasoningTags("<|channel>thought\n", "<channel|>")
    scanner = Scanner(tags=tags, in_reasoning=False)
    assert scan(scanner, "<|channel>thought\nhm\n<channel|>Hi") == [(R, "hm"), (C, "Hi")]


def test_content_after_a_stop_is_ignored() -> None:
    scanner = make(in_reasoning=False, stops=["."])
    assert scanner.feed("a.b") == [Span(C, "a")]
    assert scanner.feed("c") == [] and scanner.finish() == []


def took(scanner: Scanner, chunks: Iterable[str]) -> float:
    # Processor time: what is guarded against is quadratic work, not a busy machine.
    begin = time.process_time()
    for chunk in chunks:
        scanner.feed(chunk)
    return time.process_time() - begin


def test_long_streams_and_long_stop_strings_stay_cheap() -> None:
    assert took(make(), ["word "] * 100_000) < 5
    assert took(make(stops=["a" * 20_000 + "b"], in_reasoning=False), ["a"] * 60_000) < 10
    assert took(make(in_reasoning=False), ["<think></think>" * 50_000]) < 10
    assert took(make(), ["\n"] * 100_000) < 5
