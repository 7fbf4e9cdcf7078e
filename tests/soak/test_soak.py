"""A long run of mixed traffic: no sequence leaks, memory stays where it was, the KV books balance.

`python -m pytest -m soak tests/soak`; KILN_SOAK_SECONDS and KILN_SOAK_REQUESTS make it shorter or longer.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest

from isolation.servers import DEADLINE_S, engine_pids

from .traffic import Traffic

SECONDS = float(os.environ.get("KILN_SOAK_SECONDS", "600"))
REQUESTS = int(os.environ.get("KILN_SOAK_REQUESTS", "3000"))
CLIENTS = 12
ROUNDS = 12
# The first half fills caches, pools and histories; the longest is the window of 65,536 token gaps.
WARM_UP = 6
MOST_GROWTH = 0.03
CHEERFUL = Path(__file__).resolve().parents[2] / "models" / "tiny-reasoner-cheerful-lora"


@dataclass(frozen=True)
class Soaked:
    url: str
    server: subprocess.Popen[str]

    @property
    def engine(self) -> int:
        (pid,) = engine_pids(self.server.pid)
        return pid

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics").text
        (value,) = re.findall(rf"^{name} (\S+)$", text, re.MULTILINE)
        return float(value)

    def resident(self) -> dict[str, int]:
        """Bytes of memory that each process holds."""
        return {"server": _resident(self.server.pid), "engine": _resident(self.engine)}

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while self.metric("kiln_engine_running") or self.metric("kiln_engine_waiting"):
            assert time.monotonic() < deadline, "sequences stay although nobody asks"
            time.sleep(0.1)


def _resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (kilobytes,) = re.findall(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    return 1024 * int(kilobytes)


@pytest.fixture
def soaked(tmp_path: Path) -> Iterator[Soaked]:
    """A server with adapters, drafts, checked books, a small cache and a smaller one in the host's memory."""
    adapters = tmp_path / "adapters"
    for name in ("cheerful", "quiet"):
        shutil.copytree(CHEERFUL, adapters / name)
    _halve(adapters / "quiet" / "adapter_model.safetensors")
    environment = {
        "KILN_MODEL_ADAPTER_DIR": str(adapters),
        "KILN_ENGINE_HOST_CACHE_MIB": "4",
        "KILN_ENGINE_SPECULATION": "true",
        "KILN_ENGINE_CHECKS_BOOKS": "true",
        "KILN_ENGINE_KV_SIZE": "4096",
        "KILN_ENGINE_RETAIN_TOKENS": "1024",
    }
    command = [sys.executable, "-m", "kiln", "serve", "--port", "0"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=os.environ | environment, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            found = next(filter(None, (re.search(r"http://\S+:\d+", line) for line in server.stdout)))
            yield Soaked(found[0], server)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(DEADLINE_S)


def _halve(path: Path) -> None:
    """Make another adapter of one in float32: the same tensors at half their size."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(data[:start] + (np.frombuffer(data[start:], np.float32) / 2).tobytes())


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_mixed_traffic_leaves_nothing_behind(soaked: Soaked) -> None:
    traffic = Traffic(soaked.url, seed=1)
    engine = soaked.engine
    samples: list[dict[str, int]] = []
    asked = 0
    for number in range(ROUNDS):
        asked += await traffic.run(count=REQUESTS // ROUNDS, seconds=SECONDS / ROUNDS, clients=CLIENTS)
        soaked.wait_until_idle()
        samples.append(soaked.resident())
        # One request alone: the worker checks its books before and after it.
        assert httpx.post(f"{soaked.url}/v1/chat/completions", json=_ping(), timeout=60).status_code == 200
        soaked.wait_until_idle()
        print(f"round {number}: {asked} requests, {samples[-1]}, {dict(traffic.outcomes)}", flush=True)
    await traffic.close()
    assert traffic.strange == []
    assert soaked.engine == engine
    assert soaked.metric("kiln_engine_restarts_total") == 0
    # The run reached what it was meant to reach.
    for name in (
        "preemptions",
        "adapter_switches",
        "drafts_accepted",
        "prompt_tokens_cached",
        "prompt_tokens_restored",
    ):
        assert soaked.metric(f"kiln_{name}_total") > 0, name
    for process, before in samples[WARM_UP - 1].items():
        growth = samples[-1][process] / before - 1
        assert growth <= MOST_GROWTH, f"the {process} process grew by {growth:.1%}: {samples}"
    soaked.server.send_signal(signal.SIGTERM)
    assert soaked.server.wait(DEADLINE_S) == 0
    assert not Path(f"/proc/{engine}").exists()


def _ping() -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "1+1=?"}], "max_tokens": 4}
