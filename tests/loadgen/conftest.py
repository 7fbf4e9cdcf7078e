from __future__ import annotations

from collections.abc import Iterator

import pytest

from kiln.cli.embedded import serve_app

from .scripted import Scripted


@pytest.fixture
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture
def url(scripted: Scripted) -> Iterator[str]:
    with serve_app(scripted.app) as url:
        yield url
