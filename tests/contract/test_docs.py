"""docs/contracts.md names everything that the contracts hold."""

from __future__ import annotations

import json
from pathlib import Path

from kiln import contracts
from kiln.wire import kiln as wire

TEXT = (Path(__file__).parents[2] / "docs" / "contracts.md").read_text(encoding="utf-8")


def test_names_every_contract_and_list_of_vectors() -> None:
    vectors = json.loads(contracts.load(contracts.THINKING_BUDGET_VECTORS))
    lists = [name for name, value in vectors.items() if isinstance(value, list)]
    reasons = {v["reason"] for name in lists for v in vectors[name] if "reason" in v}
    for name in [*contracts.names(), *lists, *reasons, *wire.TRIGGERS]:
        assert f"`{name}`" in TEXT, name
