"""Servers of the native chat. Every answer is checked against the wire structs while it is received."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.applications import Starlette

from kiln.cli.assembly import create_app
from serve import traffic
from serve.scripted import Stage, scripted_app
from serve.servers import serving, settings_of

from .api import Native
from .tools import Slow, toolbox

SKILLS = Path(__file__).parents[2] / "examples" / "native" / "skills"
AGENTS = Path(__file__).parents[2] / "examples" / "native" / "agents"


def equip(app: Starlette, slow: Slow) -> None:
    """Give a running server the tools of the tests."""
    app.state.kiln = replace(app.state.kiln, toolbox=toolbox(slow))


@pytest.fixture(autouse=True)
def contract_kept() -> Iterator[None]:
    """No answer to this test's requests had another shape than the one described."""
    traffic.violations.clear()
    yield
    found = list(traffic.violations)
    traffic.violations.clear()
    assert not found, "\n".join(found[:20])


@pytest.fixture(scope="session")
def native() -> Iterator[Native]:
    """The bundled model, with the tools of the tests."""
    app = create_app(settings_of())
    with serving(app) as server:
        equip(app, Slow())
        yield Native(server)


@pytest.fixture(scope="session")
def slow() -> Slow:
    """The slow tool of the scripted server."""
    return Slow()


@pytest.fixture(scope="session")
def scripted_native(slow: Slow) -> Iterator[tuple[Native, Stage]]:
    app, stage = scripted_app(skills__dir=str(SKILLS), agents__dir=str(AGENTS), native__max_rounds=4)
    with serving(app) as server:
        equip(app, slow)
        yield Native(server), stage


@pytest.fixture
def stage(scripted_native: tuple[Native, Stage]) -> Iterator[Stage]:
    """The stage of `scripted`, cleared."""
    native, stage = scripted_native
    stage.clear()
    yield stage
    stage.clear()
    native.server.wait_idle()


@pytest.fixture
def scripted(scripted_native: tuple[Native, Stage], stage: Stage) -> Native:
    return scripted_native[0]
