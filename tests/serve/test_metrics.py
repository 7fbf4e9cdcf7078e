"""docs/metrics.md names every metric that is served, with its type and its labels, and none that is not."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from servers.server import Server

TEXT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")


def documented() -> dict[str, tuple[str, set[str]]]:
    found = {}
    for line in TEXT.splitlines():
        if line.startswith("| `"):
            names, kind, labels = line.split("|")[1:4]
            for name in re.findall(r"`(\w+)`", names):
                found[name] = kind.strip(), set(re.findall(r"`(\w+)`", labels))
    return found


def test_every_metric_is_documented(server: Server) -> None:
    server.ask(max_tokens=2, thinking_budget_tokens=1)
    server.refuse("x" * 500_000)
    text = server.client.get("/metrics").text
    # The time at which a series began is the library's, for every counter and histogram.
    served = [f for f in text_string_to_metric_families(text) if not f.name.endswith("_created")]
    names = {f"{family.name}_total" if family.type == "counter" else family.name for family in served}
    assert names == set(documented())
    for family in served:
        kind, labels = documented()[f"{family.name}_total" if family.type == "counter" else family.name]
        assert family.type == kind, family.name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == labels, sample.name
