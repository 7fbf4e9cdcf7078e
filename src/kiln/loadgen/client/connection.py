"""A small HTTP/1.1 client over asyncio: keep-alive, streaming, one clock reading a read of the socket."""

from __future__ import annotations

import asyncio
import ssl
from time import perf_counter
from typing import Protocol, cast

from kiln.loadgen.client.http1 import BadResponse, ResponseParser
from kiln.loadgen.client.target import Target
from kiln.loadgen.client.trace import Failure, StreamReceiver, Trace

CONNECT_TIMEOUT_S = 10.0
# A stream that said [DONE] but does not end its body is left after this time.
DONE_GRACE_S = 1.0


class Receiver(Protocol):
    """What takes the bytes of a response. `settled` says that whatever still comes is of no interest."""

    started: bool

    @property
    def reusable(self) -> bool: ...
    @property
    def settled(self) -> bool: ...
    def feed(self, data: bytes, now_s: float) -> bool: ...
    def closed(self, now_s: float, reason: str | None) -> None: ...
    def time_out(self, now_s: float, timeout_s: float) -> None: ...


class BodyReceiver:
    """Collects a whole response."""

    settled = False

    def __init__(self) -> None:
        self.started = False
        self.body = b""
        self.failure: Failure | None = None
        self._parser = ResponseParser()

    @property
    def status(self) -> int:
        return self._parser.status

    @property
    def reusable(self) -> bool:
        return self._parser.reusable

    def feed(self, data: bytes, now_s: float) -> bool:
        self.started = True
        try:
            self.body += self._parser.feed(data)
        except BadResponse as error:
            self.failure = Failure("malformed", str(error))
            return True
        return self._parser.complete

    def closed(self, now_s: float, reason: str | None) -> None:
        self._parser.end_of_input()
        if not self._parser.complete:
            self.failure = Failure("cut", "the connection ended" + (f": {reason}" if reason else ""))

    def time_out(self, now_s: float, timeout_s: float) -> None:
        self.failure = Failure("timeout", f"no complete answer within {timeout_s:g} s")


class _Connection(asyncio.Protocol):
    """One socket; carries one exchange at a time."""

    def __init__(self) -> None:
        self.open = False
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._over: asyncio.Future[None] | None = None
        self._grace: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)
        self.open = True

    def data_received(self, data: bytes) -> None:
        now_s = perf_counter()
        if self._receiver is None:
            self.abort()  # nobody asked for this
        elif self._receiver.feed(data, now_s):
            self._finish()
        elif self._receiver.settled and self._grace is None:
            self._grace = asyncio.get_running_loop().call_later(DONE_GRACE_S, self._finish)

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        if self._receiver is not None:
            self._receiver.closed(perf_counter(), str(error) if error else None)
            self._finish()

    def abort(self) -> None:
        self.open = False
        if self._transport is not None:
            self._transport.abort()

    async def exchange(self, request: bytes, receiver: Receiver, deadline_s: float, timeout_s: float) -> None:
        """Send and receive. Afterwards the connection is open only if it may carry another exchange."""
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._receiver = receiver
        self._over = loop.create_future()

        def time_out() -> None:
            receiver.time_out(perf_counter(), timeout_s)
            self._finish()

        timer = loop.call_later(max(0.0, deadline_s - perf_counter()), time_out)
        try:
            self._transport.write(request)
            await self._over
        finally:
            timer.cancel()
            if self._grace is not None:
                self._grace.cancel()
            self._receiver = self._over = self._grace = None
            if not (self.open and receiver.reusable):
                self.abort()

    def _finish(self) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(None)


class Client:
    """Requests to one target over connections that are kept alive. Use it within one event loop."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._idle: list[_Connection] = []
        self._tls = ssl.create_default_context() if target.tls else None

    async def stream(self, route: str, body: bytes, trace: Trace | None = None) -> Trace:
        """POST a streaming request. Every failure is in the trace; only cancellation is raised.

        A caller that wants to look on meanwhile hands a fresh trace in; its start is set here.
        """
        trace = Trace(started_s=0.0) if trace is None else trace
        trace.started_s = perf_counter()
        receiver = StreamReceiver(trace)
        failure = await self._exchange(self._head("POST", route, len(body)) + body, receiver, trace.started_s)
        if failure is not None:
            trace.failure = failure
            trace.ended_s = perf_counter()
        return trace

    async def fetch(
        self, method: str, route: str, body: bytes = b"", *, timeout_s: float | None = None
    ) -> tuple[int, bytes] | Failure:
        """Status and body of a request that is answered whole; by default within the target's timeout."""
        receiver = BodyReceiver()
        request = self._head(method, route, len(body)) + body
        failure = await self._exchange(request, receiver, perf_counter(), timeout_s) or receiver.failure
        return failure if failure is not None else (receiver.status, receiver.body)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()

    async def _exchange(
        self, request: bytes, receiver: Receiver, started_s: float, timeout_s: float | None = None
    ) -> Failure | None:
        timeout_s = self.target.timeout_s if timeout_s is None else timeout_s
        deadline_s = started_s + timeout_s
        while self._idle:
            connection = self._idle.pop()
            if not connection.open:
                continue
            attempt = _Attempt(receiver)
            await connection.exchange(request, attempt, deadline_s, timeout_s)
            if attempt.stale:
                continue  # the server had closed it while it was idle: the request never reached it
            self._keep(connection)
            return None
        try:
            connection = await self._connect(min(timeout_s, CONNECT_TIMEOUT_S))
        except TimeoutError:
            return Failure("connect", "the connection is not accepted in time")
        except (OSError, UnicodeError) as error:  # a host name may be none that can be encoded
            return Failure("connect", getattr(error, "strerror", None) or str(error))
        await connection.exchange(request, receiver, deadline_s, timeout_s)
        self._keep(connection)
        return None

    async def _connect(self, timeout_s: float) -> _Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            _, connection = await loop.create_connection(
                _Connection, self.target.host, self.target.port, ssl=self._tls
            )
        return connection

    def _keep(self, connection: _Connection) -> None:
        if connection.open:
            self._idle.append(connection)

    def _head(self, method: str, route: str, length: int) -> bytes:
        target = self.target
        host = f"[{target.host}]" if ":" in target.host else target.host
        lines = [
            f"{method} {target.base}{route} HTTP/1.1",
            f"host: {host}:{target.port}",
            "accept: text/event-stream, application/json",
            "user-agent: kiln-bench",
        ]
        if length:
            lines += ["content-type: application/json", f"content-length: {length}"]
        if target.api_key is not None:
            lines.append(f"authorization: Bearer {target.api_key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class _Attempt:
    """A receiver on a kept connection: notices that it was closed before a byte of the answer came."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self.started = False
        self.stale = False

    @property
    def reusable(self) -> bool:
        return self._receiver.reusable

    @property
    def settled(self) -> bool:
        return self._receiver.settled

    def feed(self, data: bytes, now_s: float) -> bool:
        self.started = True
        return self._receiver.feed(data, now_s)

    def closed(self, now_s: float, reason: str | None) -> None:
        self.stale = not self.started
        if not self.stale:
            self._receiver.closed(now_s, reason)

    def time_out(self, now_s: float, timeout_s: float) -> None:
        self._receiver.time_out(now_s, timeout_s)
