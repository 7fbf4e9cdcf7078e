"""Peak memory of prompt scoring: four concurrent prompts of 4,096 tokens, through the server.

All logits of one such prompt on a vocabulary of 150k would be 2.4 GB; they are reduced call by call.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import httpx

from bench.serving import settings
from kiln.cli.embedded import embedded_server


def main() -> None:
    with embedded_server(settings()) as url:
        engine = next(
            int(p.parent.name)
            for p in Path("/proc").glob("[0-9]*/cmdline")
            if b"engine_host" in p.read_bytes() and _parent(int(p.parent.name)) == os.getpid()
        )
        before = _peak_mb(engine)
        started = time.monotonic()
        asyncio.run(_score_four(url))
        seconds = time.monotonic() - started
        print("| prompts | seconds | engine peak before | engine peak after |\n|---|---|---|---|")
        print(f"| 4 x 4,096 tokens, K=5 | {seconds:.1f} | {before:.0f} MB | {_peak_mb(engine):.0f} MB |")


async def _score_four(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def one(seed: int) -> None:
            prompt = [(i * 7 + seed) % 700 + 10 for i in range(4096)]
            response = await client.post("/v1/completions", json={"prompt": prompt, "prompt_logprobs": 5})
            response.raise_for_status()

        await asyncio.gather(*(one(seed) for seed in range(4)))


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _peak_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
