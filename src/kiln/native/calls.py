"""Tool calls of the model: whose they are, and running those that are the server's."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from kiln.core.errors import InvalidField
from kiln.core.messages import Message
from kiln.core.native import ClientCall, NativeEvent, SkillUse, ToolUse
from kiln.core.text import shorten
from kiln.core.turn import ChatTurn
from kiln.skills.offer import SkillOffer
from kiln.tools.tool import Category, Outcome, Status
from kiln.tools.toolbox import Toolbox

# Calls of one round that are run; what goes beyond is denied.
MAX_CALLS = 16

Say = Callable[[NativeEvent], None]
# Whose tools are called: those of a category, skills, or nobody's.
CallKind = Category | Literal["skill", "none"]
CallEnd = Status | Literal["timeout", "cancelled"]
# Hears how each call ended, and after how many seconds; None where it was not run.
ObserveCall = Callable[[CallKind, CallEnd, float | None], None]


class CallDesk:
    """Sorts and runs the calls of one exchange.

    `client` are names of the caller's tools, `server` of the toolbox's that were offered. Without tools
    of the server every call is the caller's, also one of a tool that nobody has. `observe` hears of
    those that are not.
    """

    def __init__(
        self,
        client: frozenset[str],
        server: frozenset[str],
        toolbox: Toolbox,
        skills: SkillOffer,
        say: Say,
        observe: ObserveCall,
    ) -> None:
        self._client = client
        self._server = server
        self._toolbox = toolbox
        self._skills = skills
        self._say = say
        self._observe = observe
        self._has_own = bool(server or skills.names)

    def is_clients(self, call: ClientCall) -> bool:
        return not self._has_own or call.name in self._client

    async def run(self, calls: Sequence[ClientCall]) -> list[Message]:
        """The results of calls that are not the client's, as messages in the order of the calls.

        They run side by side. Cancelling it cancels all of them.
        """
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._run(call, i)) for i, call in enumerate(calls)]
        return [
            Message("tool", task.result(), name=call.name, tool_call_id=call.id)
            for call, task in zip(calls, tasks, strict=True)
        ]

    async def _run(self, call: ClientCall, index: int) -> str:
        arguments = await asyncio.to_thread(_arguments, call.arguments)
        if self._skills.handles(call.name):
            return await self._run_skill(call.name, arguments)
        kind: CallKind = self._toolbox.category_of(call.name) or "none"
        if index >= MAX_CALLS:
            return self._deny(
                call, kind, f"Only {MAX_CALLS} calls are run at a time; call it again if needed."
            )
        if call.name not in self._server:
            return self._deny(call, kind, f"There is no tool named {shorten(call.name, 64)}.")
        self._say(ToolUse(call.name, "running", args=arguments))
        with self._until_cancelled(kind):
            outcome = await self._toolbox.run(call.name, arguments)
        end: CallEnd = "timeout" if outcome.timed_out else outcome.status
        self._observe(kind, end, outcome.seconds if end != "denied" else None)
        self._say(to_use(outcome))
        return outcome.text

    def _deny(self, call: ClientCall, kind: CallKind, reason: str) -> str:
        self._observe(kind, "denied", None)
        self._say(ToolUse(call.name, "denied", result=reason))
        return reason

    async def _run_skill(self, name: str, arguments: dict[str, Any]) -> str:
        began = time.monotonic()
        with self._until_cancelled("skill"):
            result = await asyncio.to_thread(self._skills.run, name, arguments)
        self._observe("skill", "error" if result.failed else "done", time.monotonic() - began)
        if result.status is not None:
            context = "call" if result.status == "activated" else None
            self._say(SkillUse(result.name, result.status, context=context, resource=result.resource))
        return result.text

    @contextmanager
    def _until_cancelled(self, kind: CallKind) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        except asyncio.CancelledError:
            self._observe(kind, "cancelled", time.monotonic() - began)
            raise


def to_call(shape: dict[str, Any]) -> ClientCall:
    """A call out of OpenAI's shape."""
    return ClientCall(shape["id"], shape["function"]["name"], shape["function"]["arguments"])


def to_use(outcome: Outcome) -> ToolUse:
    """What is said of a call that ended, or of a tool that cannot be had."""
    return ToolUse(
        outcome.name,
        outcome.status,
        seconds=outcome.seconds if outcome.status != "denied" else None,
        result=outcome.text,
        sources=tuple(source.to_dict() for source in outcome.sources) or None,
    )


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call, which the parser has found to be the JSON of an object."""
    arguments: dict[str, Any] = json.loads(text)
    return arguments


def check_choice(turn: ChatTurn, refused: Sequence[Outcome]) -> None:
    """Raise InvalidField where a call that `tool_choice` asks for cannot be made; it says what is in the way.

    `refused` are tools of the server that the caller named and that cannot be had.
    """
    policy = turn.tool_policy
    if policy is None or policy.mode not in ("required", "named"):
        return
    names = {tool["function"]["name"] for tool in turn.conversation.tools}
    if policy.name in names or (policy.mode == "required" and names):
        return
    in_the_way = [outcome for outcome in refused if policy.mode == "required" or outcome.name == policy.name]
    reasons = [outcome.text for outcome in in_the_way]
    if reasons:
        raise InvalidField(
            f"`tool_choice` asks for a call that cannot be made: {' '.join(reasons[:3])}",
            param="tool_choice",
            hint="Ask for a tool that can be used, or leave tool_choice out.",
        )
