"""Servers of the native chat. Every answer is checked against the wire structs while it is received."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.applications import Starlette

from servers.fixtures import contract_kept, stage
from servers.scripted import Stage, Staged, staging
from servers.server import serving_model

from .api import Native
from .tools import Slow, toolbox

__all__ = ["contract_kept", "stage"]

SKILLS = Path(__file__).parents[2] / "examples" / "native" / "skills"
AGENTS = Path(__file__).parents[2] / "examples" / "native" / "agents"


def equip(app: Starlette, slow: Slow) -> None:
    """Give a running server the tools of the tests."""
    app.state.kiln = replace(app.state.kiln, toolbox=toolbox(slow))


@pytest.fixture(scope="session")
def native() -> Iterator[Native]:
    """The bundled model, with the tools of the tests."""
    with serving_model() as server:
        equip(server.app, Slow())
        yield Native(server)


@pytest.fixture(scope="session")
def slow() -> Slow:
    """The slow tool of the scripted server."""
    return Slow()


@pytest.fixture(scope="session")
def staged(slow: Slow) -> Iterator[Staged]:
    """A scripted model with the tools of the tests, and the skills and agents of the examples."""
    folders = {"skills__dir": str(SKILLS), "agents__dir": str(AGENTS)}
    with staging(native__max_rounds=4, **folders) as running:
        equip(running.app, slow)
        yield running


@pytest.fixture
def scripted(staged: Staged, stage: Stage) -> Native:
    """Its model says what `stage` tells it."""
    return Native(staged.server)
