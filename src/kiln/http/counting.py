"""Counts responses and refused turns at the server's own `send`, which nothing is sent past.

Who makes an error response notes its code in the scope, and who begins a turn notes that it has begun.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import Message, Scope, Send

from kiln.core.errors import KilnError
from kiln.http.metrics import Metrics

# What is posted here asks for completions, or for the scoring of a prompt.
TURNS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions/batch",
        "/v1/completions",
        "/v1/openai/chat/completions",
        "/v1/openai/completions",
        "/lmkit/v1/chat",
    }
)
_CODE = "kiln.error_code"
_BEGUN = "kiln.turn_begun"


def note_error(request: Request, error: KilnError) -> None:
    """The request is answered with this error."""
    request.scope[_CODE] = error.code


def note_begun(request: Request) -> None:
    """The request was taken by an engine: how it ends is told with its completions."""
    request.scope[_BEGUN] = True


def counting(scope: Scope, send: Send, metrics: Metrics) -> Send:
    """A `send` that counts the response which it begins."""

    async def counting_send(message: Message) -> None:
        if message["type"] == "http.response.start":
            metrics.response_sent(message["status"])
            if _CODE in scope and _BEGUN not in scope and _asks_for_turn(scope):
                metrics.refused(scope[_CODE])
        await send(message)

    return counting_send


def _asks_for_turn(scope: Scope) -> bool:
    return scope["method"] == "POST" and scope["path"] in TURNS
