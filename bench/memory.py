"""Resident memory of `kiln serve` above the weights and the KV cache, in all of its processes.

    KILN_BENCH_MODEL=model.gguf KILN_BENCH_CELLS=32768 python -m bench memory

The KV cache is computed from the model file's metadata (16-bit floats, as llama.cpp holds it by default);
the weights are counted as far as they are resident. Linux only: /proc/PID/smaps.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import gguf
import httpx

from bench.serving import user
from bench.standing import bench_settings

REQUESTS = 3
READY_WITHIN_S = 120.0


def main() -> None:
    settings = bench_settings()
    cells = settings.engine.kv_size
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "KILN_ENGINE_KV_SIZE": str(cells), "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-m", "kiln", "serve", "--port", str(port)]
    command += ["--threads", str(settings.engine.threads), "--ctx-size", str(settings.engine.ctx_size)]
    if settings.model.path is not None:
        command += ["--model", settings.model.path]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
            _wait_until_ready(client, server)
            for i in range(REQUESTS):
                body = user(f"Tell me story {i}.", max_tokens=64)
                client.post("/v1/chat/completions", json=body).raise_for_status()
            metrics = client.get("/metrics").text
        held = float(next(x.split()[1] for x in metrics.splitlines() if x.startswith("kiln_kv_cells ")))
        _report(server.pid, int(held))
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)


def _wait_until_ready(client: httpx.Client, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            client.get("/health").raise_for_status()
            return
        except httpx.HTTPError:
            time.sleep(0.2)
    sys.exit("the server did not come up")


def _report(pid: int, cells: int) -> None:
    print("| process | resident | of which weights |\n|---|---|---|")
    total = weights = 0.0
    model = ""
    for process in [pid, *_descendants(pid)]:
        resident, mapped, path = _resident_mb(process)
        total, weights, model = total + resident, weights + mapped, path or model
        print(f"| {_name(process)} | {resident:.0f} MB | {mapped:.0f} MB |")
    cache = kv_cache_mb(Path(model), cells)
    print(f"| KV cache of {cells:,} cells, computed | {cache:.0f} MB | |")
    print(f"| **above weights and KV cache** | **{total - weights - cache:.0f} MB** | |")


def kv_cache_mb(model: Path, cells: int) -> float:
    """Keys and values of every layer, in 16-bit floats."""
    fields = gguf.GGUFReader(model).fields
    architecture = fields["general.architecture"].contents()

    def number(name: str, otherwise: int = 0) -> int:
        field = fields.get(f"{architecture}.{name}")
        return otherwise if field is None else int(field.contents())

    heads = number("attention.head_count")
    width = number("embedding_length") // heads
    values_a_head = number("attention.key_length", width) + number("attention.value_length", width)
    return number("block_count") * number("attention.head_count_kv", heads) * values_a_head * 2 * cells / 1e6


def _resident_mb(pid: int) -> tuple[float, float, str]:
    """Resident memory, how much of it is of a mapped model file, and that file."""
    resident = mapped = 0
    name, model = "", ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        header = re.match(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)", line)
        if header is not None:
            name = header[1]
        elif line.startswith("Rss:"):
            kilobytes = int(line.split()[1])
            resident += kilobytes
            if name.endswith(".gguf"):
                mapped, model = mapped + kilobytes, name
    return resident * 1.024e-3, mapped * 1.024e-3, model


def _descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task").glob("*/children")
    found = [int(child) for path in children for child in path.read_text().split()]
    return found + [further for child in found for further in _descendants(child)]


def _name(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    module = words[words.index("-m") + 1] if "-m" in words else words[-1]
    return module.rpartition(".")[2]


if __name__ == "__main__":
    main()
