"""Servers of the native chat. Every answer is checked against the wire structs while it is received."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serve import traffic
from serve.scripted import Stage, scripted_app
from serve.servers import serving, serving_model

from .api import Native


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
    """The bundled model."""
    with serving_model() as server:
        yield Native(server)


@pytest.fixture(scope="session")
def scripted_native() -> Iterator[tuple[Native, Stage]]:
    app, stage = scripted_app()
    with serving(app) as server:
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
