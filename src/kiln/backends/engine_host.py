"""The engine's own process: `python -m kiln.backends.engine_host FD`.

Reads its plan and then commands from the socket FD, writes one report a step. It ends when told to,
and at once when the server's end of the socket is gone: no orphan stays behind.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import sys
import threading
from pathlib import Path

from kiln.core.errors import InternalError, KilnError
from kiln.engine.messages import StepReport
from kiln.engine.process.frames import (
    LENGTH_BYTES,
    Ready,
    Refused,
    Reported,
    RunnerPlan,
    encode_frame,
    plan_decoder,
    to_child,
)
from kiln.engine.sampling.grammar import GrammarCompiler
from kiln.engine.worker import EngineWorker, Inbox

log = logging.getLogger(__name__)


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    plan = plan_decoder.decode(read_frame(link))
    logging.basicConfig(
        level=plan.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s (engine): %(message)s"
    )
    if plan.log_level == "info":
        logging.getLogger("kiln.llamacpp").setLevel(logging.WARNING)
    try:
        serve(link, plan)
    except KilnError as error:
        link.sendall(encode_frame(Refused(error.code, error.message, error.hint)))
    except Exception as error:
        log.exception("the engine process failed to start")
        link.sendall(encode_frame(Refused(InternalError.code, str(error), None)))


def serve(link: socket.socket, plan: RunnerPlan) -> None:
    """Load, say so, and work until told to stop."""
    # The import loads the native library: after logging is set up, so that its complaints are seen.
    from kiln.backends.llamacpp import LlamaModel, LlamaRunner

    model = LlamaModel(Path(plan.model_path))
    grammars = GrammarCompiler(model)
    preparing = threading.Thread(target=grammars.prepare, name="kiln-vocabulary", daemon=True)
    preparing.start()
    runner = LlamaRunner(
        model,
        sequences=plan.sequences,
        kv_cells=plan.kv_cells,
        threads=plan.threads,
        adapters=plan.adapters,
    )
    preparing.join()
    link.sendall(encode_frame(Ready(runner.describe())))

    def publish(report: StepReport) -> None:
        link.sendall(encode_frame(Reported(report)))

    commands: Inbox = queue.SimpleQueue()
    threading.Thread(target=listen, args=(link, commands), name="kiln-commands", daemon=True).start()
    EngineWorker(runner, model.pieces, plan.limits, publish, grammars).run(commands)
    runner.close()
    model.close()


def listen(link: socket.socket, commands: Inbox) -> None:
    """Put commands on the worker's queue. The server's end is gone: so is the reason to live."""
    while True:
        try:
            frame = read_frame(link)
        except (ConnectionError, EOFError):
            os._exit(0)
        commands.put(to_child.decode(frame).command)


def read_frame(link: socket.socket) -> bytes:
    size = int.from_bytes(read_exactly(link, LENGTH_BYTES), "big")
    return read_exactly(link, size)


def read_exactly(link: socket.socket, size: int) -> bytes:
    """`size` bytes, or EOFError."""
    data = bytearray()
    while len(data) < size:
        part = link.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


if __name__ == "__main__":
    main()
