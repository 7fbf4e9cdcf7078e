"""Supervises the engine's process: native code may die, the server lives on.

The child loads the model and runs an `EngineWorker`; this side tokenizes with a vocabulary of its own
and never loads weights. When the child dies, requests it had begun end with a retryable error, requests
it had not begun are sent to its successor, and new ones wait for it. A child that hangs is killed, so
that it is one that dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Callable, Sequence

from msgspec import structs

from kiln.core.errors import EngineFailed, KilnError, ModelLoadError, error_of_code
from kiln.engine.frontend import EngineFrontend
from kiln.engine.messages import CloseThinking, Command
from kiln.engine.ports import EngineStats
from kiln.engine.process.frames import (
    LENGTH_BYTES,
    FromChild,
    Ready,
    Refused,
    Reported,
    RunnerPlan,
    ToChild,
    encode_frame,
    from_child,
)
from kiln.engine.process.watchdog import Watchdog

log = logging.getLogger(__name__)

STOP_WITHIN_S = 10.0
# After so many failed starts callers are refused until one succeeds.
START_ATTEMPTS = 3
RESTART_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0


class ProcessEngine(EngineFrontend):
    """Implements the `Engine` port over a supervised child process.

    `command` starts the child; the number of its end of the socket pair is appended. A child that owes
    a report for `hang_timeout_s` is killed. `on_stopped` runs when the engine has been stopped.
    """

    def __init__(
        self,
        command: Sequence[str],
        plan: RunnerPlan,
        *,
        context_length: int,
        max_queue: int,
        environment: dict[str, str],
        hang_timeout_s: float | None = None,
        on_stopped: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(context_length=context_length, limits=plan.limits, max_queue=max_queue)
        self._command = list(command)
        self._plan = plan
        self._environment = environment
        self._on_stopped = on_stopped
        self._child: Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._failed: KilnError | None = None
        self._stopping = False
        self._watchdog = Watchdog(hang_timeout_s, self._on_hang)
        self._hung = False
        # Commands for a child that is being started.
        self._held: deque[Command] = deque()
        self.restarts = 0
        # What the children did that have ended.
        self._past = EngineStats(0, 0, 0, 0, 0)

    @property
    def is_alive(self) -> bool:
        return self._supervisor is not None and self._failed is None and not self._stopping

    @property
    def is_restarting(self) -> bool:
        return self.is_alive and self._writer is None

    def stats(self) -> EngineStats:
        return structs.replace(self._past.followed_by(super().stats()), restarts=self.restarts)

    @property
    def pid(self) -> int | None:
        """The child's process id, while it runs."""
        return self._child.pid if self._child is not None else None

    def tell(self, command: Command) -> None:
        if self._writer is None:
            self._held.append(command)
        else:
            self._writer.write(encode_frame(ToChild(command)))
            self._watchdog.expect()

    async def start(self) -> None:
        """Start the child and wait until it serves. Raises the SetupError that it failed with."""
        reader = await self._spawn()
        self._supervisor = asyncio.create_task(self._supervise(reader))

    async def stop(self) -> None:
        """End the child; running sequences end as CANCELLED."""
        if self._supervisor is None:
            return
        self._stopping = True
        if self._writer is not None:
            with contextlib.suppress(ConnectionError):
                self._writer.write(encode_frame(ToChild(None)))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._supervisor), STOP_WITHIN_S)
        self._kill()
        self._supervisor.cancel()
        await asyncio.gather(self._supervisor, return_exceptions=True)
        self._supervisor = None
        if self._writer is not None:
            writer, self._writer = self._writer, None
            await self._close(writer)
        self.fail(self._generations.values(), EngineFailed("the engine was stopped"))
        self._on_stopped()

    async def _spawn(self) -> asyncio.StreamReader:
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as on_failure, theirs:
            on_failure.callback(ours.close)
            os.set_inheritable(theirs.fileno(), True)
            self._child = await asyncio.create_subprocess_exec(
                *self._command,
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **self._environment},
                # Ctrl-C goes to the server, which ends its child itself.
                start_new_session=True,
            )
            on_failure.pop_all()
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            writer.write(encode_frame(self._plan))
            first = await self._read(reader)
            if isinstance(first, Refused):
                raise error_of_code(first.code, first.message, hint=first.hint)
            if not isinstance(first, Ready):
                raise ModelLoadError("the engine process ended while it loaded the model")
        except BaseException:
            self._kill()
            await self._close(writer)
            raise
        self._facts = {**first.facts, "isolation": "process"}
        self._writer = writer
        while self._held:
            self.tell(self._held.popleft())
        if self._stopping:
            # The end was asked for while this child was loading.
            writer.write(encode_frame(ToChild(None)))
        return reader

    async def _supervise(self, reader: asyncio.StreamReader) -> None:
        while True:
            served = await self._relay(reader)
            self._watchdog.rest()
            writer, self._writer = self._writer, None
            if writer is not None:
                await self._close(writer)
            if self._stopping:
                return
            how = "hung and was killed" if self._hung else f"died ({self._ending()})"
            log.error("the engine process %s; starting it again", how)
            self._sort_out()
            successor = await self._respawn(START_ATTEMPTS if served else START_ATTEMPTS - 1)
            if successor is None:
                return
            reader = successor
            self.restarts += 1

    async def _relay(self, reader: asyncio.StreamReader) -> bool:
        """Pass reports on until the child ends. Returns whether it sent any."""
        served = False
        while True:
            message = await self._read(reader)
            if not isinstance(message, Reported):
                return served
            served = served or bool(message.report.deliveries)
            self.receive(message.report)
            self._watchdog.heard(owes_more=bool(self._generations))

    def _sort_out(self) -> None:
        """Begun requests end with an error; the others are held for the next child."""
        begun = [g for g in self._generations.values() if g.begun is not None]
        how, self._hung = "hung" if self._hung else "died", False
        self.fail(begun, EngineFailed(f"the engine process {how} while it worked on this request"))
        self._past = self._past.followed_by(self._stats)
        self._stats = EngineStats(0, len(self._generations), 0, self._stats.kv_cells, 0)
        self._held.clear()
        for generation in self._generations.values():
            self._held.append(generation.command)
            if generation.close_asked:
                self._held.append(CloseThinking(generation.command.key))

    async def _respawn(self, attempts: int) -> asyncio.StreamReader | None:
        attempt = 0
        while not self._stopping:
            try:
                reader = await self._spawn()
                self._failed = None
                return reader
            except (KilnError, OSError) as error:
                log.error("the engine process did not start: %s", error)
            attempt += 1
            if attempt >= attempts and self._failed is None:
                # Nobody waits any longer, but what stood in the way may pass.
                self._failed = EngineFailed("the engine process cannot be started")
                self.fail(self._generations.values(), self._failed)
                self._held.clear()
            await asyncio.sleep(min(RESTART_PAUSE_S * 2**attempt, LONGEST_PAUSE_S))
        return None

    async def _read(self, reader: asyncio.StreamReader) -> FromChild | None:
        """The next message, or None at the child's end."""
        try:
            size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
            return from_child.decode(await reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def _close(self, writer: asyncio.StreamWriter) -> None:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        if self._child is not None:
            self._kill()
            await self._child.wait()

    def _on_hang(self) -> None:
        self._hung = True
        self._kill()

    def _kill(self) -> None:
        if self._child is not None and self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()

    def _ending(self) -> str:
        code = self._child.returncode if self._child is not None else None
        return f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"
