"""The rounds of an exchange: generate, run the server's tools, generate again, until there is an answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kiln.chat.exchange.exchange import Exchange
from kiln.chat.preparing.prepare import Prepared
from kiln.chat.service import ChatService
from kiln.core.completion import ChoiceEnd, Completion
from kiln.core.errors import CloseCannotFit, InvalidField
from kiln.core.messages import Conversation, Message
from kiln.core.native import ClientCall, NativeChat, NativeEvent, Status, Summary
from kiln.core.tokens import FinishReason
from kiln.core.turn import ChatTurn
from kiln.native.account import Account
from kiln.native.calls import CallDesk, to_call
from kiln.native.voice import Voice

Say = Callable[[Sequence[NativeEvent]], None]


class Skipping:
    """The wish to skip the thinking, from wherever it comes, and the generation that it is meant for."""

    def __init__(self) -> None:
        self._current: Exchange | None = None
        self._waits = False

    def ask(self) -> None:
        """Of the round that runs; between rounds, and before the first, of the next one."""
        if self._current is not None:
            self._current.skip_thinking()
        else:
            self._waits = True

    def enter(self, exchange: Exchange) -> None:
        self._current = exchange
        if self._waits:
            self._waits = False
            exchange.skip_thinking()

    def leave(self) -> None:
        self._current = None


class Rounds:
    """Runs an exchange on a service. `opening` is said once the first round has begun: what fails before
    is still a plain HTTP error. `latest` is the exchange of the last round that began."""

    def __init__(
        self,
        chat: NativeChat,
        service: ChatService,
        desk: CallDesk,
        say: Say,
        skipping: Skipping,
        *,
        opening: Sequence[NativeEvent],
        max_rounds: int,
        entered: float,
    ) -> None:
        self._chat = chat
        self._service = service
        self._desk = desk
        self._say = say
        self._skipping = skipping
        self._opening = list(opening)
        self._max_rounds = max_rounds
        self._entered = entered
        self._account = Account()
        self._calls: list[ClientCall] = []
        self._written: list[Message] = []
        self.latest: Exchange | None = None

    async def run(self, turn: ChatTurn) -> Summary:
        """Generate until the model answers, or calls a tool of the client's."""
        reason = await self._run(turn)
        model = self._service.model
        return self._account.summary(
            model.id,
            model.context_length,
            reason=reason,
            calls=tuple(self._calls),
            messages=tuple(self._written) if self._calls or self._account.rounds > 1 else (),
        )

    async def _run(self, turn: ChatTurn) -> FinishReason | None:
        """The reason, where it is another than the last round's."""
        base = turn.conversation
        while True:
            try:
                choice = await self._generate(turn)
            except CloseCannotFit:
                if not self._account.rounds:
                    raise
                return FinishReason.LENGTH
            calls = [to_call(shape) for shape in choice.tool_calls]
            clients = [call for call in calls if self._desk.is_clients(call)]
            self._calls.extend(clients)
            if choice.finish_reason is not FinishReason.TOOL_CALLS or len(clients) == len(calls):
                # Calls that nobody will answer have no place in a transcript.
                self._written.append(_written(choice, {call.id for call in clients}))
                return None
            self._written.append(_written(choice, {call.id for call in calls}))
            own = [call for call in calls if call not in clients]
            self._written.extend(await self._desk.run(own))
            if clients:
                # The caller's part of the round is still to be done.
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
        is_last = self._account.rounds == self._max_rounds - 1
        conversation = replace(
            base,
            messages=(*base.messages, *self._written),
            # The last round has to be an answer, or the client's affair.
            tools=self._chat.turn.conversation.tools if is_last else base.tools,
            tool_choice=choice,
        )
        return self._account.next_turn(replace(turn, conversation=conversation, tool_policy=policy))

    async def _generate(self, turn: ChatTurn) -> ChoiceEnd:
        """One round. Gives the first choice; only exchanges of one round have more."""
        service = self._service
        entered = time.monotonic() if self._account.rounds else self._entered
        prepared = await service.in_worker(partial(_prepare, service, turn))
        exchange = service.start(prepared, entered=entered, joined=True)
        self.latest = exchange
        try:
            self._say_opening()
            self._skipping.enter(exchange)
            completion = await (self._forward(exchange) if self._chat.stream else exchange.collect())
        finally:
            self._skipping.leave()
            exchange.abandon()
        self._account.add(prepared, completion, service.model.max_tokens_default)
        return completion.choices[0]

    def _say_opening(self) -> None:
        opening, self._opening = self._opening, []
        self._say([*([Status("session")] if self._chat.stream else []), *opening])

    async def _forward(self, exchange: Exchange) -> Completion:
        """Say what is generated, as it comes."""
        voice = Voice(exchange.head.prompt_tokens, self._account, self._desk.is_clients)
        ends: dict[int, ChoiceEnd] = {}
        async with contextlib.aclosing(exchange.events()) as batches:
            async for batch in batches:
                for event in batch:
                    if isinstance(event, ChoiceEnd):
                        ends[event.index] = event
                self._say([said for event in batch for said in voice.say(event)])
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


def _written(choice: ChoiceEnd, calls: set[str]) -> Message:
    """What the model wrote in one round, as a message for the next, with the calls of these ids."""
    shapes: tuple[dict[str, Any], ...] = tuple(s for s in choice.tool_calls if s["id"] in calls)
    return Message(
        role="assistant",
        content=choice.content,
        reasoning_content=choice.reasoning or None,
        tool_calls=shapes or None,
    )
