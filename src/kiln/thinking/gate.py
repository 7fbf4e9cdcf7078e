"""The decode-time gate: it watches sampled candidates and replaces them to close the thinking.

One gate serves one sequence whose prompt ends inside a reasoning block. It runs on the engine's
thread, sees token ids and their bytes only, and is done for good once the block has closed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kiln.core.budgets import Outcome, Trigger
from kiln.core.tokens import Source


@dataclass(frozen=True, slots=True)
class CloseSequence:
    """The close tag: its bytes, and the tokenizer's ids of the bare tag (what is forced)."""

    ids: tuple[int, ...]
    tag: bytes
    failure: tuple[int, ...]

    @classmethod
    def of(cls, ids: Sequence[int], tag: bytes) -> CloseSequence:
        if not ids or not tag:
            raise ValueError("a close sequence needs at least one token and a tag")
        return cls(tuple(ids), tag, _prefix_function(ids))

    def advance(self, progress: int, token: int) -> int:
        """Length of the longest prefix of `ids` that the stream ends with after `token` (KMP)."""
        if progress == len(self.ids):
            progress = self.failure[progress - 1]
        while progress > 0 and self.ids[progress] != token:
            progress = self.failure[progress - 1]
        return progress + 1 if self.ids[progress] == token else 0


@dataclass(frozen=True, slots=True)
class GateLimits:
    """Limits of an applied budget: tokens, seconds, and the completion limit that holds the close too.

    All None is a gate that only watches, so that the thinking can be skipped on request.
    """

    max_tokens: int | None = None
    max_time_s: float | None = None
    completion_tokens: int | None = None


class ThinkingGate:
    """Per-sequence state machine. Call `accept` once for every decode candidate, in order.

    `pieces[i]` are the bytes of token i. `now` is a monotonic clock in seconds, read once an
    engine step; the clock of the budget starts at the first candidate.
    """

    def __init__(self, close: CloseSequence, limits: GateLimits, pieces: Sequence[bytes]) -> None:
        self._close = close
        self._limits = limits
        self._pieces = pieces
        self._progress = 0
        self._generated = 0
        self._started: float | None = None
        self._now = 0.0
        self._ended: float | None = None
        self._thinking_tokens = 0
        self._trigger: Trigger | None = None
        self._forcing = False
        self._skip = False
        self._interrupted = False
        self._closed = False
        # The last tokens, in case they hold the beginning of a tag that is written with other tokens.
        self._recent: deque[int] = deque(maxlen=len(close.tag))

    @property
    def is_done(self) -> bool:
        """The block has closed; the gate never interferes again."""
        return self._closed

    @property
    def is_forcing(self) -> bool:
        return self._forcing and not self._closed

    @property
    def next_forced(self) -> int | None:
        """The token that the next candidate will be replaced by, whatever is sampled; None if not forcing."""
        return self._close.ids[self._progress] if self.is_forcing else None

    def skip(self) -> bool:
        """Ask to close at the next candidate. False if the block has closed or is closing already."""
        if self._closed or self._forcing:
            return False
        self._skip = True
        return True

    def accept(self, sampled: int, now: float) -> tuple[int, Source]:
        """Decide the token for this position: `sampled`, or a token of the close sequence in its place."""
        if self._closed:
            return sampled, Source.SAMPLED
        if self._started is None:
            self._started = now
        self._now = now
        if self._forcing:
            return self._force()
        if self._is_plain(sampled, now):
            self._generated += 1
            self._recent.append(sampled)
            return sampled, Source.SAMPLED

        after = self._close.advance(self._progress, sampled)
        tag_tokens = after if after == len(self._close.ids) else self._tag_began(sampled)
        if tag_tokens is not None and self._within_limit(self._generated + 1 - tag_tokens):
            self._closed = True
            self._ended = now
            self._thinking_tokens = self._generated + 1 - tag_tokens
            return sampled, Source.SAMPLED

        trigger = self._due(sampled, after, now)
        if trigger is not None or (self._skip and sampled != self._close.ids[self._progress]):
            self._trigger = trigger
            self._interrupted = trigger is None
            self._forcing = True
            self._ended = now
            self._thinking_tokens = self._generated - self._progress
            return self._force()

        self._progress = after
        self._generated += 1
        self._recent.append(sampled)
        return sampled, Source.SAMPLED

    def outcome(self) -> Outcome:
        """What happened so far; final once the sequence has ended."""
        closed_or_forced = self._closed or self._forcing
        # Tokens of a close that has begun and was not finished are not thinking.
        thinking = self._thinking_tokens if closed_or_forced else self._generated - self._progress
        end = self._ended if self._ended is not None else self._now
        elapsed = 0.0 if self._started is None else end - self._started
        return Outcome(
            trigger=self._trigger,
            closed=self._closed,
            thinking_tokens=thinking,
            thinking_time_ms=int(elapsed * 1000),
            interrupted=self._interrupted,
        )

    def _is_plain(self, sampled: int, now: float) -> bool:
        """Whether nothing is to be decided: no close has begun or can end here, and no limit is near.

        All but a few tokens take this way, so it is kept short; the whole rules would accept them too.
        """
        close, limits, generated = self._close, self._limits, self._generated
        return (
            self._progress == 0
            and sampled != close.ids[0]
            and close.tag[-1] not in self._pieces[sampled]
            and not self._skip
            and (limits.max_tokens is None or generated < limits.max_tokens)
            and (
                limits.max_time_s is None
                or now - (now if self._started is None else self._started) < limits.max_time_s
            )
            and (limits.completion_tokens is None or generated + len(close.ids) < limits.completion_tokens)
        )

    def _due(self, sampled: int, after: int, now: float) -> Trigger | None:
        limits = self._limits
        if not self._within_limit(self._generated + 1 - after):
            return Trigger.TOKENS
        if sampled == self._close.ids[self._progress]:
            return None  # a natural close that has begun wins on the boundary
        assert self._started is not None
        if limits.max_time_s is not None and now - self._started >= limits.max_time_s:
            return Trigger.TIME
        reserve = limits.completion_tokens
        if reserve is not None and self._generated + len(self._close.ids) >= reserve:
            return Trigger.MAX_TOKENS
        return None

    def _within_limit(self, thinking_tokens: int) -> bool:
        return self._limits.max_tokens is None or thinking_tokens <= self._limits.max_tokens

    def _force(self) -> tuple[int, Source]:
        token = self._close.ids[self._progress]
        self._progress += 1
        self._generated += 1
        self._closed = self._progress == len(self._close.ids)
        return token, Source.FORCED

    def text_after_close(self, token: int) -> bytes:
        """What `token` would say behind a close tag that it completes; tokens may spell the tag freely."""
        if self._closed or self._forcing:
            return b""
        text, start = self._find_tag(token)
        return b"" if start < 0 else text[start + len(self._close.tag) :]

    def _tag_began(self, token: int) -> int | None:
        """How many tokens up to this one begin at or after the tag's first byte; None if no tag ends here."""
        text, start = self._find_tag(token)
        if start < 0:
            return None
        count, position = 0, len(text)
        for part in (self._pieces[t] for t in (token, *reversed(self._recent))):
            position -= len(part)
            if position < start:
                break
            count += 1
        return count

    def _find_tag(self, token: int) -> tuple[bytes, int]:
        """The text up to and with `token`, and where in it the tag begins that it completes; else -1."""
        piece, tag = self._pieces[token], self._close.tag
        if tag[-1] not in piece:
            return piece, -1
        text = b"".join(self._pieces[t] for t in self._recent) + piece
        # A tag that ended earlier would have closed the gate then: only this piece can complete it.
        return text, text.find(tag, max(0, len(text) - len(piece) - len(tag) + 1))


def stop_overlaps_close(stop: str, tag: str) -> bool:
    """Whether a stop string equals, contains, is contained in, or shares an edge with the close tag."""
    if not stop:
        return False
    if stop in tag or tag in stop:
        return True
    edges = range(1, min(len(stop), len(tag)))
    return any(stop.endswith(tag[:k]) or tag.endswith(stop[:k]) for k in edges)


def _prefix_function(ids: Sequence[int]) -> tuple[int, ...]:
    failure = [0] * len(ids)
    k = 0
    for i in range(1, len(ids)):
        while k > 0 and ids[k] != ids[i]:
            k = failure[k - 1]
        if ids[k] == ids[i]:
            k += 1
        failure[i] = k
    return tuple(failure)
