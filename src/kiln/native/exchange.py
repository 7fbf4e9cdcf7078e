"""The native exchange: rounds of generation, and what the server does between them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kiln.chat.catalog import Lease, LoadProgress, Narrate
from kiln.chat.prepare import Prepared
from kiln.chat.service import ChatService, Exchange
from kiln.core.completion import ChoiceEnd, Completion
from kiln.core.errors import CloseCannotFit, InvalidField, RequestTimedOut
from kiln.core.messages import Conversation, Message
from kiln.core.native import ClientCall, NativeChat, NativeEvent, Status, Summary
from kiln.core.tokens import FinishReason
from kiln.core.turn import ChatTurn
from kiln.native.account import Account
from kiln.native.calls import CallDesk, to_call, to_use
from kiln.native.context import Surroundings, surround
from kiln.native.voice import Voice
from kiln.tools.toolbox import Toolbox

# A lease on a model by its name (None is the default model), which is loaded if need be.
Attach = Callable[[str | None, Narrate], Awaitable[Lease]]


@dataclass(frozen=True, slots=True)
class Means:
    """What an exchange works with. `timeout_s` bounds it from its arrival on, None = not at all."""

    attach: Attach
    toolbox: Toolbox
    max_rounds: int = 8
    timeout_s: float | None = None


class NativeExchange:
    """One exchange. It works in a task of its own, so that it can be narrated, skipped and cancelled in
    any phase; `events` reads what it says."""

    def __init__(
        self,
        chat: NativeChat,
        surroundings: Surroundings,
        means: Means,
        *,
        entered: float,
        on_end: Callable[[], None],
    ) -> None:
        """`entered` is `time.monotonic()` at the handler's entry. `on_end` is called once, before the
        summary can be read or when the exchange is abandoned."""
        self._chat = chat
        self._surroundings = surroundings
        self._means = means
        self._entered = entered
        self._on_end = on_end
        self._account = Account()
        self._calls: list[ClientCall] = []
        self._written: list[Message] = []
        self._current: Exchange | None = None
        self._skips_next = False
        # Said once the first round runs: what fails before is still a plain HTTP error.
        self._opening: list[NativeEvent] = []
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
        seconds = self._means.timeout_s
        deadline = None if seconds is None else asyncio.get_running_loop().time() + self._left(seconds)
        try:
            async with asyncio.timeout_at(deadline) as limit:
                summary = await self._work()
        except TimeoutError as error:
            late = limit.expired()
            self._fail(
                RequestTimedOut(f"the request ran for more than {seconds:g} seconds") if late else error
            )
        except Exception as error:
            self._fail(error)
        else:
            self._end()
            self._say(summary)

    def _left(self, seconds: float) -> float:
        return max(0.0, self._entered + seconds - time.monotonic())

    def _fail(self, error: Exception) -> None:
        self._end()
        self._said.put_nowait(error)

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, _nothing
        on_end()

    def _say(self, *events: NativeEvent) -> None:
        if events:
            self._said.put_nowait(list(events))

    async def _work(self) -> Summary:
        # Held for all rounds: the model must not go while a tool runs.
        with await self._means.attach(self._chat.turn.model, self._narrate_load) as service:
            desk, turn = await self._prepare_first()
            reason = await self._rounds(service, desk, turn)
            model = service.model
        return self._account.summary(
            model.id,
            model.context_length,
            reason=reason,
            calls=tuple(self._calls),
            messages=tuple(self._written) if self._calls or self._account.rounds > 1 else (),
        )

    def _narrate_load(self, progress: LoadProgress) -> None:
        self._say(Status(progress.phase, progress.done, progress.total))

    async def _prepare_first(self) -> tuple[CallDesk, ChatTurn]:
        """Gather the tools and texts that the server adds."""
        chat, around = self._chat, self._surroundings
        offered = await self._means.toolbox.offer(chat.server_tools)
        self._opening = [*around.uses, *(to_use(outcome) for outcome in offered.refused)]
        names = frozenset(tool["function"]["name"] for tool in offered.definitions)
        desk = CallDesk(chat.client_tools, names, self._means.toolbox, around.offer, self._say)
        system = [text for text in (around.pinned, around.offer.catalog) if text]
        conversation = surround(
            chat.turn.conversation, system=system, tools=(*offered.definitions, *around.offer.tools)
        )
        return desk, replace(chat.turn, conversation=conversation)

    async def _rounds(self, service: ChatService, desk: CallDesk, turn: ChatTurn) -> FinishReason | None:
        """Generate until the model answers, or calls a tool of the client's. A reason that differs from
        that of the last round, if there is one."""
        base = turn.conversation
        while True:
            try:
                choice = await self._generate(service, desk, turn)
            except CloseCannotFit:
                if not self._account.rounds:
                    raise
                return FinishReason.LENGTH
            runs = choice.finish_reason is FinishReason.TOOL_CALLS
            calls = [to_call(shape) for shape in choice.tool_calls]
            own = [call for call in calls if not desk.is_clients(call)] if runs else []
            # Calls that nobody will answer have no place in a transcript.
            kept = [
                s for s, call in zip(choice.tool_calls, calls, strict=True) if runs or desk.is_clients(call)
            ]
            self._written.append(_written(choice, kept))
            if not own:
                return None
            self._written.extend(await desk.run(own))
            if len(own) < len(calls):
                # The caller's part of the round is still to be done; the server's is in `messages`.
                return None
            if self._account.tokens_left <= 0:
                return FinishReason.LENGTH
            turn = self._next_turn(turn, base)

    def _next_turn(self, turn: ChatTurn, base: Conversation) -> ChatTurn:
        """The next round: what was written joins the conversation, what was used up is gone."""
        policy, choice = turn.tool_policy, base.tool_choice
        if policy is not None and policy.mode in ("required", "named"):
            # The call that was asked for has been made.
            policy, choice = replace(policy, mode="auto", name=None), "auto"
        is_last = self._account.rounds == self._means.max_rounds - 1
        conversation = replace(
            base,
            messages=(*base.messages, *self._written),
            # The last round has to be an answer, or the client's affair.
            tools=self._chat.turn.conversation.tools if is_last else base.tools,
            tool_choice=choice,
        )
        return self._account.next_turn(replace(turn, conversation=conversation, tool_policy=policy))

    async def _generate(self, service: ChatService, desk: CallDesk, turn: ChatTurn) -> ChoiceEnd:
        """One round. Gives the first choice; only exchanges of one round have more."""
        entered = time.monotonic() if self._account.rounds else self._entered
        prepared = await service.in_worker(partial(_prepare, service, turn))
        exchange = service.start(prepared, entered=entered)
        try:
            self._current = exchange
            self._say_opening()
            if self._skips_next:
                self._skips_next = False
                exchange.skip_thinking()
            if self._chat.stream:
                completion = await self._forward(exchange, desk)
            else:
                completion = await exchange.collect()
        finally:
            self._current = None
            exchange.abandon()
        self._account.add(prepared, completion, service.model.max_tokens_default)
        calls = [to_call(shape) for shape in completion.choices[0].tool_calls]
        self._calls.extend(call for call in calls if desk.is_clients(call))
        return completion.choices[0]

    def _say_opening(self) -> None:
        opening, self._opening = self._opening, []
        self._say(*([Status("session")] if self._chat.stream else []), *opening)

    async def _forward(self, exchange: Exchange, desk: CallDesk) -> Completion:
        """Say what is generated, as it comes."""
        voice = Voice(exchange.head.prompt_tokens, self._account, desk.is_clients)
        ends: dict[int, ChoiceEnd] = {}
        async with contextlib.aclosing(exchange.events()) as batches:
            async for batch in batches:
                for event in batch:
                    if isinstance(event, ChoiceEnd):
                        ends[event.index] = event
                self._say(*(said for event in batch for said in voice.say(event)))
        return Completion(exchange.head, tuple(ends[i] for i in sorted(ends)))


def _prepare(service: ChatService, turn: ChatTurn) -> Prepared:
    try:
        return service.prepare(turn)
    except InvalidField as error:
        # The tools stand in an envelope that a request of this dialect does not have.
        if error.param is not None:
            mended = error.param.replace("].function", "]")
            error.message = error.message.replace(error.param, mended)
            error.param = mended
        raise


def _written(choice: ChoiceEnd, calls: list[dict[str, Any]]) -> Message:
    """What the model wrote in one round, as a message for the next."""
    return Message(
        role="assistant",
        content=choice.content,
        reasoning_content=choice.reasoning or None,
        tool_calls=tuple(calls) or None,
    )


def _nothing() -> None:
    pass
