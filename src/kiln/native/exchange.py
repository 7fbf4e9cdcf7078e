"""The native exchange: attach to a model, generate, and narrate."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial

from kiln.chat.catalog import Lease, LoadProgress, Narrate
from kiln.chat.service import ChatService, Exchange
from kiln.core.completion import (
    ChoiceEnd,
    Completion,
    ExchangeEvent,
    PromptRead,
    TextDelta,
    ToolCallDelta,
)
from kiln.core.messages import Message
from kiln.core.native import ClientCall, NativeChat, NativeEvent, Status, Summary
from kiln.native.account import ROUND_GAP, Account

# A lease on a model by its name (None is the default model), which is loaded if need be.
Attach = Callable[[str | None, Narrate], Awaitable[Lease]]


class NativeExchange:
    """One exchange. It works in a task of its own, so that it can be narrated, skipped and cancelled in
    any phase; `events` reads what it says."""

    def __init__(
        self, chat: NativeChat, attach: Attach, *, entered: float, on_end: Callable[[], None]
    ) -> None:
        """`entered` is `time.monotonic()` at the handler's entry. `on_end` is called once, before the
        summary can be read or when the exchange is abandoned."""
        self._chat = chat
        self._attach = attach
        self._entered = entered
        self._on_end = on_end
        self._account = Account()
        self._calls: list[ClientCall] = []
        self._current: Exchange | None = None
        self._skips_next = False
        self._said: asyncio.Queue[list[NativeEvent] | Exception] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to work. Call it once, on the event loop."""
        self._task = asyncio.create_task(self._run())
        # A task that is cancelled before it began runs nothing of its own.
        self._task.add_done_callback(lambda _: self._end())

    async def events(self) -> AsyncGenerator[list[NativeEvent]]:
        """Events as they come, the Summary last. Raises the KilnError that the exchange failed with."""
        while True:
            said = await self._said.get()
            if isinstance(said, Exception):
                raise said
            yield said
            if isinstance(said[-1], Summary):
                return

    async def collect(self) -> tuple[Summary, list[NativeEvent]]:
        """Run to the end: the summary, and everything that happened."""
        happened: list[NativeEvent] = []
        async with contextlib.aclosing(self.events()) as batches:
            async for batch in batches:
                happened.extend(batch)
        summary = happened[-1]
        assert isinstance(summary, Summary)
        return summary, happened

    def skip_thinking(self) -> None:
        """Close the reasoning at the next token. Between rounds, that of the next round."""
        if self._current is not None:
            self._current.skip_thinking()
        else:
            self._skips_next = True

    def abandon(self) -> None:
        """Nobody reads any more: free everything, whatever is being done. Idempotent."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            summary = await self._work()
        except Exception as error:
            self._end()
            self._said.put_nowait(error)
        else:
            self._end()
            self._say(summary)

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, _nothing
        on_end()

    def _say(self, *events: NativeEvent) -> None:
        if events:
            self._said.put_nowait(list(events))

    async def _work(self) -> Summary:
        # Held for all rounds: the model must not go while a tool runs.
        with await self._attach(self._chat.turn.model, self._narrate_load) as service:
            (choice, *_) = await self._generate(service)
            model = service.model
        messages = (_written(choice),) if choice.tool_calls else ()
        return self._account.summary(
            model.id, model.context_length, calls=tuple(self._calls), messages=messages
        )

    def _narrate_load(self, progress: LoadProgress) -> None:
        self._say(Status(progress.phase, progress.done, progress.total))

    async def _generate(self, service: ChatService) -> tuple[ChoiceEnd, ...]:
        """One round of generation."""
        turn = self._chat.turn
        prepared = await service.in_worker(partial(service.prepare, turn))
        exchange = service.start(prepared, entered=self._entered)
        try:
            self._current = exchange
            if self._skips_next:
                self._skips_next = False
                exchange.skip_thinking()
            if self._chat.stream:
                completion = await self._forward(exchange)
            else:
                completion = await exchange.collect()
                for choice in completion.choices:
                    for call in choice.tool_calls:
                        self._say(self._client_call(call))
        finally:
            self._current = None
            exchange.abandon()
        self._account.add(prepared, completion, service.model.max_tokens_default)
        return completion.choices

    async def _forward(self, exchange: Exchange) -> Completion:
        """Say what is generated, as it comes."""
        voice = _Voice(exchange.head.prompt_tokens, self._account)
        self._say(Status("session"))
        ends: dict[int, ChoiceEnd] = {}
        async with contextlib.aclosing(exchange.events()) as batches:
            async for batch in batches:
                said: list[NativeEvent] = []
                for event in batch:
                    if isinstance(event, ChoiceEnd):
                        ends[event.index] = event
                    elif isinstance(event, ToolCallDelta):
                        said.append(self._client_call(event.call))
                    else:
                        said.extend(voice.say(event))
                self._say(*said)
        return Completion(exchange.head, tuple(ends[i] for i in sorted(ends)))

    def _client_call(self, call: dict[str, object]) -> ClientCall:
        function = call["function"]
        assert isinstance(function, dict)
        made = ClientCall(str(call["id"]), function["name"], function["arguments"])
        self._calls.append(made)
        return made


class _Voice:
    """Turns what one round generates into what is said of it."""

    def __init__(self, prompt_tokens: int, account: Account) -> None:
        self._prompt_tokens = prompt_tokens
        before = account.alternatives[0] if account.alternatives else None
        # What an earlier round wrote on a channel is set apart from what this one writes.
        self._gaps = {
            "reasoning": ROUND_GAP if before is not None and before.thinking else "",
            "content": ROUND_GAP if before is not None and before.text else "",
        }

    def say(self, event: ExchangeEvent) -> list[NativeEvent]:
        if isinstance(event, TextDelta):
            gap = self._gaps.pop(event.channel, "")
            return [TextDelta(event.index, event.channel, gap + event.text) if gap else event]
        if isinstance(event, PromptRead) and event.index == 0:
            return [Status("prompt", event.tokens, self._prompt_tokens)]
        return []


def _written(choice: ChoiceEnd) -> Message:
    """What the model wrote in one round, as a message for the next."""
    return Message(
        role="assistant",
        content=choice.content,
        reasoning_content=choice.reasoning or None,
        tool_calls=choice.tool_calls or None,
    )


def _nothing() -> None:
    pass
