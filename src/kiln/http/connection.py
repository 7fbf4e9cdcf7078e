"""What one connection may cost before a request has come: bytes, time, and its place among others.

uvicorn's protocol bounds none of these. What is added here is a comparison for each read and each header
field; what is written to a client passes untouched.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import ClassVar

from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kiln.core.errors import HeadTooLarge, HeadTooSlow, KilnError, MalformedHttp, TooManyConnections
from kiln.core.settings import ServerSettings
from kiln.http.problems import error_body, native_error_body
from kiln.http.state import ServerState

# A refused client is heard for so long: closing with unread data throws the answer away (see refusal.py).
_LINGER_S = 2.0
# So many connections beyond the limit are answered at a time; more are closed without a word.
_TURNED_AWAY_AT_ONCE = 64


def protocol_within(limits: ServerSettings, app: Starlette) -> type[asyncio.Protocol]:
    """The protocol of one server's connections, for uvicorn's `http`; the app's metrics count refusals."""

    class Within(BoundedProtocol):
        pass

    Within.limits = limits
    Within.of_app = app
    Within.turned_away = set()
    return Within


class BoundedProtocol(HttpToolsProtocol):
    """A connection whose heads must be small and come in time.

    Bytes are counted twice: as parsed fields, which is exact, and as read without a byte of a body in them,
    which bounds what the parser gathers of a line that does not end, in a head, a trailer or a chunk's size.
    """

    limits: ClassVar[ServerSettings]
    of_app: ClassVar[Starlette]
    turned_away: ClassVar[set[BoundedProtocol]]

    _field_bytes = 0
    _read_bytes = 0
    # Why the connection ends, and whether that has been said.
    _refusal: KilnError | None = None
    _is_leaving = False
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = self.limits.max_connections
        if len(self.connections) - len(self.turned_away) > most:
            self.turned_away.add(self)
            self._leave(TooManyConnections(f"{most} connections are open, the most there may be"))
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.turned_away.discard(self)
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_leaving:
            return
        self._read_bytes += len(data)
        super().data_received(data)
        if self._read_bytes > self.limits.max_header_bytes:
            self._refuse_head()
        if self._refusal is not None:
            self._leave(self._refusal)
        elif self._timer is None and not self._is_answering() and not self.transport.is_closing():
            self._await_head()

    def on_message_begin(self) -> None:
        self._field_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._field_bytes += len(url)
        if self._field_bytes > self.limits.max_header_bytes:
            self._refuse_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._field_bytes += len(name) + len(value) + 4  # a colon, a blank, the line's end
        if self._field_bytes <= self.limits.max_header_bytes:
            super().on_header(name, value)
        else:
            self._refuse_head()

    def on_headers_complete(self) -> None:
        # What else the refused read holds is parsed to its end, but begins nothing.
        if self._refusal is None:
            self._read_bytes = 0
            self._stop_timer()
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._refusal is None:
            self._read_bytes = 0
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._refusal is None:
            self._read_bytes = 0
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        # uvicorn calls this for what the parser refuses.
        self._leave(self._refusal or MalformedHttp("what was sent is not a request in HTTP/1.1"))

    def _refuse_head(self) -> None:
        most = self.limits.max_header_bytes
        self._refusal = self._refusal or HeadTooLarge(f"the request's header has more than {most} bytes")

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        # Between requests uvicorn's own timer waits for the first byte.
        self._timer = self.loop.call_later(self.limits.header_timeout_s, self._on_late_head)

    def _on_late_head(self) -> None:
        if self._read_bytes > 0:
            seconds = self.limits.header_timeout_s
            self._leave(HeadTooSlow(f"the request's header was not complete after {seconds:g} seconds"))
        else:
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _leave(self, error: KilnError) -> None:
        """Say why, where no other answer is being written, and close the connection."""
        if self._is_leaving:
            return
        self._is_leaving = True
        self._stop_timer()
        self._unset_keepalive_if_required()
        state: ServerState = self.of_app.state.kiln
        state.metrics.connection_refused(error)
        if self._is_answering() or len(self.turned_away) > _TURNED_AWAY_AT_ONCE:
            self.transport.close()
            return
        self.transport.write(self._answer(error))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(_LINGER_S, self.transport.close)

    def _answer(self, error: KilnError) -> bytes:
        is_native = getattr(self, "url", b"").startswith(b"/lmkit/")
        body = native_error_body(error) if is_native else error_body(error)
        headers = [*self.server_state.default_headers, (b"content-type", b"application/json")]
        headers += [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        if error.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % error.retry_after_s))
        status = HTTPStatus(error.status)
        head = b"HTTP/1.1 %d %s\r\n" % (status, status.phrase.encode())
        return head + b"".join(b"%s: %s\r\n" % pair for pair in headers) + b"\r\n" + body
