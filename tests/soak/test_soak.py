"""A long run of mixed traffic: no sequence leaks, memory stays where it was, the KV books balance.

`python -m pytest -m soak tests/soak`; KILN_SOAK_SECONDS and KILN_SOAK_REQUESTS make it shorter or longer.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest

from isolation.servers import engine_pids
from servers.process import Served, served_by_process
from servers.server import metric, wait_until

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
    served: Served

    @property
    def url(self) -> str:
        return self.served.url

    @property
    def engine(self) -> int:
        (pid,) = engine_pids(self.served.process.pid)
        return pid

    def metric(self, name: str) -> float:
        return metric(httpx.get(f"{self.url}/metrics").text, name)

    def resident(self) -> dict[str, int]:
        """Bytes of memory that each process holds."""
        return {"server": _resident(self.served.process.pid), "engine": _resident(self.engine)}

    def wait_until_idle(self) -> None:
        busy = ("kiln_engine_running", "kiln_engine_waiting")
        wait_until(lambda: not any(self.metric(name) for name in busy), "no sequence stays")


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
    with served_by_process(
        tmp_path,
        engine__threads=os.cpu_count() or 1,
        model__adapter_dir=adapters,
        engine__host_cache_mib=4,
        engine__speculation="true",
        engine__checks_books="true",
        engine__kv_size=4096,
        engine__retain_tokens=1024,
    ) as served:
        yield Soaked(served)


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
    soaked.served.send(signal.SIGTERM)
    assert soaked.served.wait() == 0
    assert not Path(f"/proc/{engine}").exists()


def _ping() -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "1+1=?"}], "max_tokens": 4}
