"""The native exchanges that are running, by the names that their callers gave them."""

from __future__ import annotations

from typing import Protocol

from kiln.core.errors import RequestIdInUse
from kiln.core.text import shorten


class Skippable(Protocol):
    """A running exchange, seen from a side channel."""

    def skip_thinking(self) -> None: ...


class LiveExchanges:
    """Names are an owner's own: nobody finds, or collides with, what another key started."""

    def __init__(self) -> None:
        self._live: dict[tuple[str, str], Skippable] = {}

    def enter(self, owner: str, request_id: str, exchange: Skippable) -> None:
        """Raises RequestIdInUse while another exchange of the owner has the name."""
        if (owner, request_id) in self._live:
            raise RequestIdInUse(
                f"`request_id`: an exchange {shorten(request_id)} is running", param="request_id"
            )
        self._live[owner, request_id] = exchange

    def leave(self, owner: str, request_id: str, exchange: Skippable) -> None:
        """Free the name, if this exchange has it. Idempotent."""
        if self._live.get((owner, request_id)) is exchange:
            del self._live[owner, request_id]

    def find(self, owner: str, request_id: str) -> Skippable | None:
        return self._live.get((owner, request_id))
