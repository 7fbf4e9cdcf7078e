"""Sizes that are derived where the settings leave them open."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiln.cli.assembly import sizes
from kiln.core.settings import Settings
from servers.server import settings_of


def test_the_hosts_share_is_derived_from_the_memory_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(sizes, "CONTAINER_LIMIT", limit)
    for written, expected in (("4294967296\n", 2**29), ("max\n", None)):
        limit.write_text(written)
        derived = sizes.host_cache_bytes(Settings.default())
        assert 0 < derived <= 8 * 2**30
        assert expected is None or derived == expected


def test_a_stated_share_or_limit_is_kept_to() -> None:
    assert sizes.host_cache_bytes(settings_of(engine__host_cache_mib=0)) == 0
    assert sizes.host_cache_bytes(settings_of(engine__host_cache_mib=20_000)) == 20_000 * 2**20
    assert sizes.host_cache_bytes(settings_of(model__memory_limit_mb=800)) == 100_000_000
