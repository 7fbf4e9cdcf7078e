"""Fixtures that several folders share. A conftest imports those it wants, and has servers of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import traffic
from .scripted import Stage, Staged, staging


@pytest.fixture(autouse=True)
def contract_kept() -> Iterator[None]:
    """No answer to this test's requests broke the contract."""
    traffic.violations.clear()
    yield
    found = list(traffic.violations)
    traffic.violations.clear()
    assert not found, "\n".join(found[:20])


@pytest.fixture(scope="session")
def staged() -> Iterator[Staged]:
    """A server over a scripted model, with default settings."""
    with staging() as running:
        yield running


@pytest.fixture
def stage(staged: Staged) -> Iterator[Stage]:
    """What the model of `staged` will say; cleared."""
    yield from staged.cleared()
