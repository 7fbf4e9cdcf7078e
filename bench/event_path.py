"""The event path alone: a scripted model, paced streams, events per CPU second of the server process.

What is measured is everything but the model: hand-over, detokenizing, scanning, encoding, writing.
The client runs in a process of its own; the server's CPU time is read from its own clock.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from bench.serving import settings
from kiln.cli.assembly import app_over, describe_model, load_model
from kiln.cli.embedded import serve_app
from kiln.engine.ports import ModelCall
from kiln.loadgen.load import ClosedLoop, Until, run_load
from kiln.loadgen.server import connect

TOKENS = 300
STEP_S = 0.02


class PacedRunner:
    """Says the digit 7 for ever, one step every 20 ms, whatever the number of rows."""

    max_rows = 2048
    can_share = False

    def __init__(self, n_vocab: int, token: int, sequences: int) -> None:
        self.n_vocab = n_vocab
        self.sequences = sequences
        self.kv_cells = sequences * 1024
        self._logits = np.zeros((max(sequences, 64), n_vocab), np.float32)
        self._logits[:, token] = 1.0
        self._next = 0.0

    def execute(self, call: ModelCall) -> NDArray[np.float32]:
        self._next = max(self._next + STEP_S, time.monotonic())
        time.sleep(max(0.0, self._next - time.monotonic()))
        return self._logits[: sum(chunk.outputs for chunk in call.chunks)]

    def drop(self, sequence: int) -> None: ...

    def collect(self) -> None: ...

    def copy(self, source: int, target: int, length: int) -> None: ...

    def describe(self) -> Mapping[str, object]:
        return {"backend": "paced"}

    def close(self) -> None: ...


def main() -> None:
    print(f"{TOKENS} tokens a stream, a step every {STEP_S * 1000:.0f} ms")
    print("| streams | events/s | server CPU | events per CPU second |\n|---|---|---|---|")
    for streams in (64, 128):
        events, seconds, cpu = measure(streams)
        print(
            f"| {streams} | {events / seconds:.0f} | {cpu / seconds:.0%} of a core | {events / cpu:.0f} |",
            flush=True,
        )


def measure(streams: int) -> tuple[int, float, float]:
    """Events, wall seconds and CPU seconds of a server in a process of its own."""
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, streams), daemon=True)
    server.start()
    url = ours.recv()
    known = connect(url)
    body = json.dumps(
        {
            "model": known.target.model,
            "messages": [{"role": "user", "content": "7"}],
            "stream": True,
            "max_tokens": TOKENS,
            "temperature": 0,
            "chat_template_kwargs": {"enable_thinking": False},
        }
    ).encode()
    ours.send("start")
    ours.recv()
    started = time.monotonic()
    run_load(known.target, [body] * streams, ClosedLoop(streams), Until(streams, None))
    seconds = time.monotonic() - started
    ours.send("stop")
    cpu = float(ours.recv())
    server.terminate()
    return streams * TOKENS, seconds, cpu


def serve(pipe: Connection, streams: int) -> None:
    base = settings(parallel=streams)
    llama = load_model(base, vocabulary_only=True)
    model = describe_model(base, llama)
    token = llama.encode("7")[0]
    app = app_over(base, llama, model, lambda: PacedRunner(llama.n_vocab, token, streams + 1))
    with serve_app(app) as url:
        pipe.send(url)
        pipe.recv()
        before = time.process_time()
        pipe.send("go")
        pipe.recv()
        pipe.send(time.process_time() - before)


if __name__ == "__main__":
    main()
