"""An engine process whose model says the same digit for ever, at a steady pace.

Started like kiln's own (`kiln.backends.engine_host`), with `TOKEN STEP_S` before the socket's number.
"""

from __future__ import annotations

import queue
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kiln.backends.engine_host import listen, read_frame
from kiln.backends.llamacpp import LlamaModel
from kiln.engine.messages import StepReport
from kiln.engine.process.frames import Ready, Reported, encode_frame, plan_decoder
from kiln.engine.runner import ModelCall
from kiln.engine.sampling.grammar import GrammarCompiler
from kiln.engine.worker import EngineWorker, Inbox


class PacedRunner:
    """Every step of decode rows takes `step_s`, prompt calls take nothing."""

    max_rows = 2048
    can_share = False
    exact_drafts = False
    adapter_s = 0.0

    def __init__(self, n_vocab: int, token: int, sequences: int, kv_cells: int, step_s: float) -> None:
        self.n_vocab = n_vocab
        self.sequences = sequences
        self.kv_cells = kv_cells
        self._step_s = step_s
        self._logits = np.zeros((max(sequences, 64), n_vocab), np.float32)
        self._logits[:, token] = 1.0
        self._next = 0.0
        self._decoded: set[int] = set()

    def execute(self, call: ModelCall) -> NDArray[np.float32]:
        rows = {chunk.sequence for chunk in call.chunks if len(chunk.tokens) == 1 and chunk.start > 0}
        # A step of many rows takes several calls: the pace is that of the step.
        if rows & self._decoded:
            self._decoded.clear()
            self._next = max(self._next + self._step_s, time.monotonic())
            time.sleep(max(0.0, self._next - time.monotonic()))
        self._decoded |= rows
        return self._logits[: sum(chunk.outputs for chunk in call.chunks)]

    def drop(self, sequence: int) -> None: ...

    def length(self, sequence: int) -> int:
        raise AssertionError("nothing is held")

    def save(self, sequence: int, most_bytes: int) -> NDArray[np.uint8] | None:
        raise AssertionError("nothing is held")

    def restore(self, sequence: int, data: NDArray[np.uint8]) -> None:
        raise AssertionError("nothing is held")

    def trim(self, sequence: int, length: int) -> None: ...

    def collect(self) -> None: ...

    def copy(self, source: int, target: int, length: int) -> None: ...

    def describe(self) -> Mapping[str, object]:
        return {"backend": "paced"}

    def close(self) -> None: ...


def main() -> None:
    token, step_s, link = int(sys.argv[1]), float(sys.argv[2]), socket.socket(fileno=int(sys.argv[3]))
    plan = plan_decoder.decode(read_frame(link))
    model = LlamaModel(Path(plan.model_path), vocabulary_only=True)
    runner = PacedRunner(model.n_vocab, token, plan.sequences, plan.kv_cells, step_s)
    link.sendall(encode_frame(Ready(dict(runner.describe()))))

    def publish(report: StepReport) -> None:
        link.sendall(encode_frame(Reported(report)))

    commands: Inbox = queue.SimpleQueue()
    threading.Thread(target=listen, args=(link, commands), daemon=True).start()
    EngineWorker(runner, model.pieces, plan.limits, publish, GrammarCompiler(model)).run(commands)


if __name__ == "__main__":
    main()
