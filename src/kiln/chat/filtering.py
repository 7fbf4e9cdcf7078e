"""A configured filter over visible answers: what it does not let through is not shown.

The contract of the hook, `openai.content_filter = "module:function"`:

    def function(text: str, final: bool) -> bool | None

It is called with the whole visible answer of a choice so far (no reasoning, no tool calls), and `final`
when nothing more will come. True lets everything up to there be shown; False ends the choice with
`content_filter`; None, while `final` is false, holds the text back until more of it is known. It may be a
coroutine function; an ordinary one runs on a worker thread, several calls at once. An answer without text
is not asked about. Where the hook raises, the request fails and nothing that was held is shown.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kiln.chat.exchange.exchange import Exchange
from kiln.core.completion import ChoiceEnd, Completion, ExchangeEvent, TextDelta, TokenScored
from kiln.core.errors import InternalError
from kiln.core.latency import TokenTiming
from kiln.core.tokens import FinishReason

log = logging.getLogger(__name__)

Verdict = bool | None
# An ordinary function's word, or a coroutine's.
Hook = Callable[[str, bool], Any]


class ContentFilter:
    """Asks a hook about answers."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        called = hook if inspect.isfunction(hook) or inspect.ismethod(hook) else type(hook).__call__
        self._is_async = inspect.iscoroutinefunction(called)

    async def judge(self, text: str, *, final: bool) -> Verdict:
        """The hook's word, never None for a final text. Raises InternalError where the hook fails."""
        if not text:
            return True
        try:
            if self._is_async:
                verdict: Verdict = await self._hook(text, final)
            else:
                verdict = await asyncio.to_thread(self._hook, text, final)
        except Exception:
            log.exception("the content filter failed")
            raise InternalError("the content filter failed") from None
        if verdict is None and not final:
            return None
        return verdict is True

    async def events(self, exchange: Exchange) -> AsyncIterator[list[ExchangeEvent]]:
        """The exchange's events without what may not be shown; a choice that is refused ends there."""
        choices: dict[int, _Filtered] = {}
        events = exchange.events()
        try:
            async for batch in events:
                # A batch is of one choice.
                index = next((e.index for e in batch if not isinstance(e, TokenTiming)), 0)
                choice = choices.setdefault(index, _Filtered())
                shown = await self._pass(choice, batch)
                if choice.refused and not choice.stopped:
                    choice.stopped = True
                    exchange.stop_choice(index)
                if shown:
                    yield shown
        finally:
            await events.aclose()

    async def _pass(self, choice: _Filtered, batch: list[ExchangeEvent]) -> list[ExchangeEvent]:
        """What of a batch of one choice may be shown now."""
        shown: list[ExchangeEvent] = []
        grew = False
        for event in batch:
            if isinstance(event, ChoiceEnd):
                if not choice.refused:
                    verdict: Verdict = await self.judge(choice.text, final=True)
                    choice.refused = verdict is False
                shown.extend(choice.release())
                shown.append(_refused(event) if choice.refused else event)
            elif isinstance(event, TextDelta) and event.channel == "content":
                choice.text += event.text
                choice.held.append(event)
                grew = True
            elif choice.held or choice.refused or isinstance(event, TokenScored):
                # A score comes before its token's text: it waits to see what that is.
                choice.held.append(event)
            else:
                shown.append(event)
        if batch and isinstance(batch[-1], ChoiceEnd):
            return shown
        if grew and not choice.refused:
            verdict = await self.judge(choice.text, final=False)
            choice.refused = verdict is False
            if verdict is not None:
                shown.extend(choice.release())
        elif choice.text == "" or choice.refused:
            shown.extend(choice.release())
        return shown

    async def whole(self, completion: Completion) -> Completion:
        """A completion whose refused choices are emptied."""
        choices = [await self.choice(choice) for choice in completion.choices]
        return replace(completion, choices=tuple(choices))

    async def choice(self, choice: ChoiceEnd) -> ChoiceEnd:
        return choice if await self.judge(choice.content, final=True) else _refused(choice)


@dataclass(slots=True)
class _Filtered:
    """What one choice has said, and what of it is held back."""

    text: str = ""
    held: list[ExchangeEvent] = field(default_factory=list)
    refused: bool = False
    stopped: bool = False

    def release(self) -> list[ExchangeEvent]:
        held, self.held = self.held, []
        return [] if self.refused else held


def _refused(end: ChoiceEnd) -> ChoiceEnd:
    return replace(
        end,
        content="",
        tool_calls=(),
        finish_reason=FinishReason.CONTENT_FILTER,
        logprobs=None if end.logprobs is None else (),
    )
