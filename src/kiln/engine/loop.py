"""The engine on a thread of this process: for tests, for debugging, and where isolation is not wanted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from kiln.core.errors import EngineFailed, KilnError
from kiln.engine.frontend import EngineFrontend
from kiln.engine.messages import Command, EngineLimits
from kiln.engine.runner import ModelRunner
from kiln.engine.sampling.grammar import GrammarCompiler
from kiln.engine.worker import EngineWorker, Inbox

log = logging.getLogger(__name__)


class BatchingEngine(EngineFrontend):
    """Implements the `Engine` port over a `ModelRunner`, on a thread that owns the runner until `stop`.

    At most `parallel` sequences run at once; the runner's other sequences retain prefixes. A step
    computes at most `step_tokens` prompt tokens, `stall_tokens` while others decode. `pieces[i]` are
    the bytes of token i, for the thinking gate. Sequences with equal adapters get `turn_steps` steps in
    a row while others wait; at most `draft_tokens` are drafted at once for each. Without `grammars`
    constrained requests fail. `on_stopped` runs after the runner is closed.
    """

    def __init__(
        self,
        make_runner: Callable[[], ModelRunner],
        *,
        pieces: SequenceOf[bytes],
        context_length: int,
        parallel: int,
        step_tokens: int = 512,
        stall_tokens: int = 128,
        retain_tokens: int = 0,
        turn_steps: int = 4,
        draft_tokens: int = 0,
        checks_books: bool = False,
        host_bytes: int = 0,
        max_queue: int = 256,
        grammars: GrammarCompiler | None = None,
        on_stopped: Callable[[], None] = lambda: None,
    ) -> None:
        limits = EngineLimits(
            parallel,
            step_tokens,
            stall_tokens,
            retain_tokens,
            turn_steps,
            draft_tokens,
            checks_books,
            host_bytes,
        )
        super().__init__(context_length=context_length, limits=limits, max_queue=max_queue)
        self._make_runner = make_runner
        self._pieces = pieces
        self._grammars = grammars
        self._on_stopped = on_stopped
        self._commands: Inbox = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failed: KilnError | None = None

    @property
    def is_alive(self) -> bool:
        return self._failed is None and self._thread is not None

    def tell(self, command: Command) -> None:
        self._commands.put(command)

    async def start(self) -> None:
        """Start the engine thread and wait until the runner is ready. Raises what its making raised."""
        loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = loop.create_future()

        def hand_over(function: Callable[..., None], *args: object) -> None:
            # The loop may be gone when a test or a crash tears the server down first.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(function, *args)

        def run() -> None:
            try:
                runner = self._make_runner()
            except BaseException as error:
                hand_over(started.set_exception, error)
                return
            try:
                self._facts = {**runner.describe(), "isolation": "inline"}
                worker = EngineWorker(
                    runner,
                    self._pieces,
                    self._limits,
                    lambda report: hand_over(self.receive, report),
                    self._grammars,
                )
                hand_over(started.set_result, None)
                worker.run(self._commands)
            except BaseException:
                log.exception("the engine thread ended")
                hand_over(self._die)
            finally:
                runner.close()

        thread = threading.Thread(target=run, name="kiln-engine", daemon=True)
        thread.start()
        try:
            await asyncio.shield(started)
        except asyncio.CancelledError:
            # A load cannot be broken off: the thread ends right after it.
            self._commands.put(None)
            await asyncio.to_thread(thread.join)
            raise
        self._thread = thread

    async def stop(self) -> None:
        """End the thread; running sequences end as CANCELLED. Native memory is free when this returns."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._commands.put(None)
            await asyncio.to_thread(thread.join)
            self._on_stopped()

    def _die(self) -> None:
        self._failed = EngineFailed("the engine stopped unexpectedly")
        self.fail(self._generations.values(), self._failed)
