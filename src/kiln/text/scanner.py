"""Splits generated text into reasoning, content and tool calls, as it arrives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct

from kiln.text.markers import MarkerSearch
from kiln.text.reasoning import ReasoningTags

NEWLINES = "\r\n"
_CHUNK = 4096


class Channel(StrEnum):
    REASONING = "reasoning"
    CONTENT = "content"
    TOOL = "tool"
    TOOL_PART = "tool_part"


class Span(Struct, frozen=True):
    """A piece of one channel. A TOOL span is the whole body of one call, between the markers it names."""

    channel: Channel
    text: str
    opened_by: str = ""
    closed_by: str = ""

    @property
    def as_written(self) -> str:
        """The text with its markers."""
        return f"{self.opened_by}{self.text}{self.closed_by}"


@dataclass(frozen=True, slots=True)
class ToolMarkers:
    """What encloses a tool call in generated text.

    `also_open` are other ways to begin one. An answer that begins with one of `starts` is a call from there,
    that text included. With `ends_with_turn` the end of the model's turn closes a call too; an empty `close`
    leaves it to that. A call that `holds_json` is not closed by its marker inside a JSON string.
    """

    open: str
    close: str
    also_open: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    ends_with_turn: bool = False
    holds_json: bool = False


class Scanner:
    """One generated choice's text, split into spans. The same text gives the same channels, however cut.

    The state decides which markers count: in reasoning only the close tag; in content the open tag, the
    stop strings and the tool open; in a tool call only its close. Newlines around blocks are template
    whitespace and belong to no channel:

    - behind an open tag, a close tag or a tool call they are skipped (the "lead"), and behind a close tag a
      second close tag as well;
    - before a close tag or a tool call they are dropped, so trailing ones wait for what follows.

    With `calls_lead` a call only counts where no other content came before it: behind that its marker is
    text, as in a JSON answer that mentions one. `silent` texts in content are dropped. With `live_calls` the
    body of a call comes as TOOL_PART spans too, while it is written; the TOOL span behind them is whole.

    `stopped` is the stop string that matched, after which all text is ignored; `in_reasoning` says whether
    a reasoning block is open.
    """

    def __init__(
        self,
        *,
        tags: ReasoningTags | None,
        in_reasoning: bool,
        stops: Sequence[str] = (),
        tools: ToolMarkers | None = None,
        silent: Sequence[str] = (),
        live_calls: bool = False,
        calls_lead: bool = False,
        reopens: bool = True,
    ) -> None:
        """`in_reasoning` says that the prompt already opened the block; without `tags` it has no effect.

        Without `reopens` an open tag in content is content, as where a grammar makes it a part of the data.
        """
        self.stopped: str | None = None
        self.in_reasoning = in_reasoning and tags is not None
        self._open = tags.open.rstrip(NEWLINES) if tags is not None and reopens else ""
        self._close = tags.close if tags is not None else ""
        self._stops = frozenset(stops)
        self._tools = tools
        self._silent = frozenset(silent)
        self._live_calls = live_calls
        self._calls_lead = calls_lead
        self._content_begun = False
        tool_opens = (tools.open, *tools.also_open) if tools is not None else ()
        tool_close = tools.close if tools is not None else ""
        self._starts = tools.starts if tools is not None else ()
        self._start_text = ""  # whitespace that an answer begins with, and what may be a start behind it
        self._searches = {
            Channel.REASONING: MarkerSearch([self._close]),
            Channel.CONTENT: MarkerSearch([self._open, *tool_opens, *silent, *stops]),
            Channel.TOOL: MarkerSearch([tool_close]),
        }
        self._state = Channel.REASONING if self.in_reasoning else Channel.CONTENT
        self._in_lead = self.in_reasoning
        self._closed_just_now = False
        self._lead = ""  # the beginning of what may be a second close tag
        self._newlines: list[str] = []  # trailing newlines that wait for what follows
        self._tool_body: list[str] = []
        self._tool_open = ""
        self._quotes = _Quotes()
        self._at_rest = self._is_at_rest()

    @property
    def in_call(self) -> bool:
        """Whether a tool call has begun and not ended."""
        return self._state is Channel.TOOL

    def feed(self, text: str) -> list[Span]:
        """The spans that became certain with this text."""
        # Most tokens are so: nothing is held back, and nothing in the text may begin a marker.
        if self._at_rest and text[-1:] not in NEWLINES and len(text) < _CHUNK:
            if self._searches[self._state].is_clear_of(text):
                return [Span(self._state, text)]
        spans: list[Span] = []
        # A long text is taken in slices, as every marker found in it copies the rest of its slice.
        for start in range(0, len(text), _CHUNK):
            self._consume(text[start : start + _CHUNK], spans, final=False)
        self._at_rest = self._is_at_rest()
        return spans

    def finish(self, *, turn_ended: bool = False) -> list[Span]:
        """The spans that were held back. `turn_ended`: the model ended its turn, nothing cut it.

        An unclosed tool call is content, its marker included, unless the end of the turn closes it.
        """
        spans: list[Span] = []
        self._consume("", spans, final=True)
        if self.stopped is not None:
            return spans
        if self._state is Channel.TOOL and self._tools is not None:
            if turn_ended and self._tools.ends_with_turn:
                self._end_call("", spans)
            else:
                body, self._tool_body = self._tool_open + "".join(self._tool_body), []
                self._state = Channel.CONTENT
                self._flush_newlines(spans)
                _append(spans, Channel.CONTENT, body)
        self._flush_newlines(spans)
        return spans

    def _is_at_rest(self) -> bool:
        """Whether text without a marker would be one span of the present state, as it is."""
        return (
            self._state is not Channel.TOOL
            and not (self._in_lead or self._newlines or self._starts)
            and (self._content_begun or not self._calls_lead)
            and self.stopped is None
        )

    def _consume(self, text: str, spans: list[Span], *, final: bool) -> None:
        while self.stopped is None:
            if self._in_lead:
                text = self._skip_lead(text, final=final)
                if self._in_lead:
                    return
            if self._starts and self._state is Channel.CONTENT:
                text = self._look_for_start(text, final=final)
                if self._start_text:
                    return
            search = self._searches[self._state]
            search.push(text)
            plain, marker = search.next(final=final)
            self._write(plain, spans)
            if marker is None:
                return
            text = search.take()
            self._pass(marker, spans)

    def _skip_lead(self, text: str, *, final: bool) -> str:
        """Text without the newlines, and second close tags, behind a marker; the lead goes on when empty."""
        text = (self._lead + text).lstrip(NEWLINES)
        self._lead = ""
        if self._closed_just_now:
            while text.startswith(self._close):
                text = text[len(self._close) :].lstrip(NEWLINES)
            if text and not final and self._close.startswith(text):
                self._lead = text
                return ""
        if text:
            self._in_lead = False
        return text

    def _look_for_start(self, text: str, *, final: bool) -> str:
        """Where an answer begins: enter a call that has no marker. Text that decides nothing yet is kept."""
        text, self._start_text = self._start_text + text, ""
        bare = text.lstrip()
        if any(bare.startswith(start) for start in self._starts):
            self._state, self._tool_open, self._starts = Channel.TOOL, "", ()
            return bare
        if not final and any(start.startswith(bare) for start in self._starts):
            self._start_text = text
            return ""
        if bare:
            self._starts = ()
        return text

    def _pass(self, marker: str, spans: list[Span]) -> None:
        """Change state at a marker. A stop string that is also a tag counts as the stop string."""
        if self._state is Channel.REASONING:
            self._newlines.clear()
            self._enter(Channel.CONTENT, closed=True)
        elif self._state is Channel.TOOL:
            if self._tools is not None and self._tools.holds_json and self._quotes.open:
                self._write(marker, spans)
            else:
                self._end_call(marker, spans)
        elif marker in self._stops:
            self._flush_newlines(spans)
            self.stopped = marker
        elif marker == self._open:
            self._flush_newlines(spans)
            self._enter(Channel.REASONING, closed=False)
        elif marker in self._silent:
            pass
        elif self._calls_lead and self._content_begun:
            self._write(marker, spans)
        else:
            # The newlines before it are kept: they are content after all if the call never closes.
            self._state, self._tool_open, self._starts = Channel.TOOL, marker, ()

    def _end_call(self, marker: str, spans: list[Span]) -> None:
        self._newlines.clear()
        spans.append(Span(Channel.TOOL, "".join(self._tool_body), self._tool_open, marker))
        self._tool_body = []
        self._quotes = _Quotes()
        self._enter(Channel.CONTENT, closed=False)

    def _enter(self, state: Channel, *, closed: bool) -> None:
        self._state = state
        self.in_reasoning = state is Channel.REASONING
        self._in_lead = True
        self._closed_just_now = closed

    def _write(self, text: str, spans: list[Span]) -> None:
        """Emit plain text of the present state, except for newlines that a block may turn out to follow."""
        if not text:
            return
        if self._state is Channel.TOOL:
            self._tool_body.append(text)
            self._quotes.read(text)
            if self._live_calls:
                spans.append(Span(Channel.TOOL_PART, text, self._tool_open))
            return
        waits = self._state is Channel.REASONING or self._tools is not None
        body = text.rstrip(NEWLINES) if waits else text
        if body:
            self._content_begun = self._content_begun or self._state is Channel.CONTENT
            self._flush_newlines(spans)
            _append(spans, self._state, body)
        if len(body) < len(text):
            self._newlines.append(text[len(body) :])

    def _flush_newlines(self, spans: list[Span]) -> None:
        if self._newlines:
            _append(spans, self._state, "".join(self._newlines))
            self._newlines.clear()


class _Quotes:
    """Whether a text that is read piece by piece stands inside a JSON string."""

    def __init__(self) -> None:
        self.open = False
        self._escaped = False

    def read(self, text: str) -> None:
        if not self.open and '"' not in text:
            return
        for char in text:
            if self._escaped:
                self._escaped = False
            elif char == '"':
                self.open = not self.open
            elif char in NEWLINES:
                # No JSON string goes over lines: one that was never closed ends here.
                self.open = False
            else:
                self._escaped = self.open and char == "\\"


def _append(spans: list[Span], channel: Channel, text: str) -> None:
    """Add text to a list of spans, joined to a short last span of the same channel."""
    if spans and spans[-1].channel is channel and len(spans[-1].text) < _CHUNK:
        spans[-1] = Span(channel, spans[-1].text + text)
    else:
        spans.append(Span(channel, text))
