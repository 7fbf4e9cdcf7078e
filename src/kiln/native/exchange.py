"""The native exchange: a task that attaches to a model, gathers what the server adds, and runs the rounds."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from kiln.chat.models.seat import Lease, LoadProgress, Narrate
from kiln.chat.remembering.memory import Memory, Transcript, as_context
from kiln.chat.service import ChatService
from kiln.core.access import current_owner
from kiln.core.errors import KilnError, RequestTimedOut
from kiln.core.native import NativeChat, NativeEvent, Status, Summary
from kiln.core.tokens import FinishReason
from kiln.core.turn import ChatTurn
from kiln.native.calls import CallDesk, ObserveCall, check_choice, to_use
from kiln.native.context import Surroundings, question_of, surround
from kiln.native.rounds import Rounds, Skipping
from kiln.tools.toolbox import Offer, Toolbox

# Seconds of silence after which a reader hears that the exchange is still there.
SILENCE_S = 15.0

# A lease on a model by its name (None is the default model), which is loaded if need be.
Attach = Callable[[str | None, Narrate], Awaitable[Lease]]


@dataclass(frozen=True, slots=True)
class Means:
    """What an exchange works with. `timeout_s` bounds it from its arrival on, None = not at all."""

    attach: Attach
    toolbox: Toolbox
    memory: Memory
    observe_call: ObserveCall
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
        self._skipping = Skipping()
        self._rounds: Rounds | None = None
        self._said: asyncio.Queue[list[NativeEvent] | Exception] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._failure: KilnError | None = None
        self._spoke = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to work. Call it once, on the event loop."""
        self._task = asyncio.create_task(self._run())
        # A task that is cancelled before it began runs nothing of its own.
        self._task.add_done_callback(lambda _: self._end())

    @property
    def has_begun(self) -> bool:
        """Whether an engine has taken its first round."""
        return self._rounds is not None and self._rounds.latest is not None

    async def events(self) -> AsyncGenerator[list[NativeEvent]]:
        """Events as they come, the Summary last; nothing at all after each SILENCE_S of a streamed one.

        Raises the KilnError that the exchange failed with.
        """
        while True:
            said = await self._said.get()
            if isinstance(said, Exception):
                raise said
            yield said
            if said and isinstance(said[-1], Summary):
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
        self._skipping.ask()

    def abandon(self) -> None:
        """Nobody reads any more: free everything, whatever is being done. Idempotent."""
        if self._task is not None:
            self._task.cancel()

    def fail(self, error: KilnError) -> None:
        """End the exchange with an error, whatever is being done."""
        self._failure = error
        self.abandon()

    async def _run(self) -> None:
        seconds = self._means.timeout_s
        try:
            async with asyncio.timeout(None if seconds is None else self._left(seconds)) as limit:
                summary, exchange_id = await self._work()
        except asyncio.CancelledError:
            if self._failure is None:
                raise
            self._fail(self._failure)
        except TimeoutError as error:
            self._fail(self._late() if limit.expired() else error)
        except Exception as error:
            self._fail(error)
        else:
            self._end()
            self._say([summary])
            self._learn(summary, exchange_id)

    def _left(self, seconds: float) -> float:
        return max(0.0, self._entered + seconds - time.monotonic())

    def _late(self) -> RequestTimedOut:
        seconds, rounds = self._means.timeout_s, self._rounds
        assert seconds is not None
        if rounds is None or rounds.latest is None:
            return RequestTimedOut.after(seconds)
        return rounds.latest.late(seconds)

    def _fail(self, error: Exception) -> None:
        self._end()
        self._said.put_nowait(error)

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, _nothing
        on_end()
        if self._timer is not None:
            self._timer.cancel()

    def _say(self, events: Sequence[NativeEvent]) -> None:
        if not events:
            return
        self._spoke = time.monotonic()
        self._said.put_nowait(list(events))
        if self._timer is None and self._chat.stream:
            self._timer = asyncio.get_running_loop().call_later(SILENCE_S, self._break_silence)

    def _break_silence(self) -> None:
        """Between an exchange and its reader there may be those who end what is silent for long."""
        left = self._spoke + SILENCE_S - time.monotonic()
        if left <= 0:
            self._said.put_nowait([])
            self._spoke, left = time.monotonic(), SILENCE_S
        self._timer = asyncio.get_running_loop().call_later(left, self._break_silence)

    async def _work(self) -> tuple[Summary, str]:
        """The summary, and the id of the last round."""
        # Held for all rounds: the model must not go while a tool runs.
        lease = await self._means.attach(self._chat.turn.model, self._narrate_load)
        with lease as service, service.joined(self.fail):
            offered = await self._means.toolbox.offer(self._chat.server_tools)
            rounds = self._rounds = self._to_rounds(service, offered)
            turn = self._turn(offered, await self._recall())
            check_choice(turn, offered.refused)
            summary = await rounds.run(turn)
        assert rounds.latest is not None
        return summary, rounds.latest.head.id

    def _narrate_load(self, progress: LoadProgress) -> None:
        self._say([Status(progress.phase, progress.done, progress.total)])

    def _to_rounds(self, service: ChatService, offered: Offer) -> Rounds:
        chat, around, means = self._chat, self._surroundings, self._means
        names = frozenset(tool["function"]["name"] for tool in offered.definitions)
        return Rounds(
            chat,
            service,
            CallDesk(
                chat.client_tools,
                names,
                means.toolbox,
                around.offer,
                lambda said: self._say([said]),
                means.observe_call,
            ),
            self._say,
            self._skipping,
            opening=(*around.uses, *(to_use(outcome) for outcome in offered.refused)),
            max_rounds=means.max_rounds,
            entered=self._entered,
        )

    def _turn(self, offered: Offer, remembered: str) -> ChatTurn:
        """The turn of the first round: what is asked, and what the server adds."""
        chat, around = self._chat, self._surroundings
        conversation = surround(
            chat.turn.conversation,
            system=[text for text in (remembered, around.pinned, around.offer.catalog) if text],
            tools=(*offered.definitions, *around.offer.tools),
        )
        return replace(chat.turn, conversation=conversation)

    async def _recall(self) -> str:
        """What the memory holds that goes with the question, for the system turn."""
        chat = self._chat
        if chat.memory is None:
            return ""
        question = question_of(chat.turn.conversation)
        facts = await self._means.memory.recall(current_owner(), chat.memory, chat.memory_store, question)
        return as_context(facts)

    def _learn(self, summary: Summary, exchange_id: str) -> None:
        """Have the memory learn from an exchange that came to an answer, once that is out."""
        chat, memory, answer = self._chat, self._means.memory, summary.alternatives[0]
        if chat.memory is None or not memory.is_on or answer.reason is not FinishReason.STOP:
            return
        key = memory.key(current_owner(), chat.memory, chat.memory_store)
        question = question_of(chat.turn.conversation)
        memory.learn(Transcript(key, exchange_id, summary.model, question, answer.text))


def _nothing() -> None:
    pass
