"""The event path alone: a scripted model, paced streams, events per CPU second of the server process.

What is measured is everything on the server's side of the engine: taking the engine's reports, detokenizing,
scanning, encoding, writing. The engine and the client run in processes of their own; the server's CPU time
is read from its own clock, between the moments when all streams run and when the first one ends.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from bench.serving import settings
from kiln.cli.assembly import app_with, describe_model, load_model
from kiln.cli.embedded import serve_app
from kiln.engine.messages import EngineLimits
from kiln.engine.process.frames import RunnerPlan
from kiln.engine.process.supervisor import ProcessEngine
from kiln.loadgen.load import ClosedLoop, Until, run_load
from kiln.loadgen.server import connect

STEP_S = 0.02
SECONDS = 6.0
TOKENS = 1000
CELLS = 1280


def main() -> None:
    print(f"a step every {STEP_S * 1000:.0f} ms")
    print("| streams | events/s | server CPU | events per CPU second |\n|---|---|---|---|")
    for streams in (64, 128):
        events, seconds, cpu = measure(streams)
        print(
            f"| {streams} | {events / seconds:.0f} | {cpu / seconds:.0%} of a core | {events / cpu:.0f} |",
            flush=True,
        )


def measure(streams: int) -> tuple[int, float, float]:
    """Events, wall seconds and CPU seconds of a server in a process of its own, in the steady state."""
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    server = spawn.Process(target=serve, args=(theirs, streams))
    server.start()
    load = spawn.Process(target=send_load, args=(ours.recv(), streams), daemon=True)
    load.start()
    events, seconds, cpu = ours.recv()
    load.kill()
    ours.send("stop")
    server.join(10)
    return events, seconds, cpu


def send_load(url: str, streams: int) -> None:
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
    run_load(known.target, [body] * streams, ClosedLoop(streams), Until(streams, None))


def serve(pipe: Connection, streams: int) -> None:
    """Serve, and measure once all streams run."""
    base = settings(parallel=streams)
    llama = load_model(base, vocabulary_only=True)
    model = describe_model(base, llama)
    token = str(llama.encode("7")[0])
    engine = ProcessEngine(
        [sys.executable, str(Path(__file__).with_name("paced_host.py")), token, str(STEP_S)],
        RunnerPlan(str(llama.path), streams + 1, streams * CELLS, 1, 0, EngineLimits(streams), "warning"),
        context_length=model.context_length,
        max_queue=streams,
        environment={},
        on_stopped=llama.close,
    )
    app = app_with(base, llama, model, engine)
    with serve_app(app) as url:
        pipe.send(url)
        while engine.stats().running < streams:
            time.sleep(0.05)
        time.sleep(1.0)
        steps, started, cpu = engine.stats().steps, time.monotonic(), time.process_time()
        time.sleep(SECONDS)
        steps, seconds, cpu = (
            engine.stats().steps - steps,
            time.monotonic() - started,
            time.process_time() - cpu,
        )
        assert engine.stats().running == streams, "a stream ended too early to measure"
        pipe.send((steps * streams, seconds, cpu))
        pipe.recv()


if __name__ == "__main__":
    main()
