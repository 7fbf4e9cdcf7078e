"""What holds for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# No test fails by the clock: a busy machine may take any time for an example.
settings.register_profile("kiln", deadline=None)
settings.load_profile("kiln")

# Idle compute threads sleep, so that a busy machine does not slow them to a crawl. libgomp reads this when
# it is loaded, and some test modules import llama.cpp themselves.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.fixture(scope="session", autouse=True)
def own_state_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing reads or writes the store of whoever runs the tests."""
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    yield
    if before is None:
        del os.environ["XDG_STATE_HOME"]
    else:
        os.environ["XDG_STATE_HOME"] = before
