"""docs/metrics.md names every metric that is served, with its type and its labels, and none that is not."""

from __future__ import annotations

import re
from math import inf
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kiln.core.latency import STALL_CAUSES
from kiln.http.metrics import PHASES
from servers.server import Server

TEXT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")


def documented() -> dict[str, tuple[str, set[str]]]:
    found = {}
    for line in TEXT.splitlines():
        if line.startswith("| `kiln_"):
            names, kind, labels = line.split("|")[1:4]
            for name in re.findall(r"`(\w+)`", names):
                found[name] = kind.strip(), set(re.findall(r"`(\w+)`", labels))
    return found


def test_every_metric_is_documented(server: Server) -> None:
    server.ask(max_tokens=2, thinking_budget_tokens=1)
    server.refuse("x" * 500_000)
    text = server.client.get("/metrics").text
    served = list(text_string_to_metric_families(text))
    names = {f"{family.name}_total" if family.type == "counter" else family.name for family in served}
    assert names == set(documented())
    for family in served:
        kind, labels = documented()[f"{family.name}_total" if family.type == "counter" else family.name]
        assert family.type == kind, family.name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == labels, sample.name


def buckets(server: Server, name: str) -> list[float]:
    families = {f.name: f for f in text_string_to_metric_families(server.client.get("/metrics").text)}
    return [float(s.labels["le"]) for s in families[name].samples if s.name.endswith("_bucket")]


def test_the_first_token_has_buckets_of_its_own(server: Server) -> None:
    bounds = buckets(server, "kiln_time_to_first_token_seconds")
    assert bounds == [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, inf]
    assert buckets(server, "kiln_thinking_budget_effective_seconds")[0] == 0


def test_the_page_leaves_out_when_series_began_and_other_pages_keep_it(server: Server) -> None:
    assert "_created" not in server.client.get("/metrics").text
    others = CollectorRegistry()
    Counter("others", "An application's own.", registry=others).inc()
    assert b"others_created" in generate_latest(others)


def test_every_phase_and_every_cause_of_a_stall_is_defined() -> None:
    phases = TEXT.split("### Phases")[1].split("### Stalls")[0]
    assert re.findall(r"^\| `(\w+)` \|", phases, re.M) == list(PHASES)
    stalls = TEXT.split("### Stalls")[1].split("##")[0]
    # The one that no gap between tokens can have: it is the client's time.
    assert set(STALL_CAUSES) - {"client_delivery"} <= set(re.findall(r"`(\w+)`", stalls))
