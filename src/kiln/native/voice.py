"""What is said of a round while it is generated."""

from __future__ import annotations

from collections.abc import Callable

from kiln.core.completion import ExchangeEvent, PromptRead, TextDelta, ToolCallDelta
from kiln.core.native import ClientCall, NativeEvent, Status
from kiln.native.account import ROUND_GAP, Account
from kiln.native.calls import to_call


class Voice:
    """Turns the events of one round into those of the exchange."""

    def __init__(
        self, prompt_tokens: int, account: Account, is_clients: Callable[[ClientCall], bool]
    ) -> None:
        self._prompt_tokens = prompt_tokens
        self._is_clients = is_clients
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
        if isinstance(event, ToolCallDelta):
            call = to_call(event.call)
            return [call] if self._is_clients(call) else []
        if isinstance(event, PromptRead) and event.index == 0:
            return [Status("prompt", event.tokens, self._prompt_tokens)]
        return []
