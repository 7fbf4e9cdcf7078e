from __future__ import annotations

import pytest

from kiln.backends.llamacpp import LlamaModel
from kiln.cli.assembly import load_model
from kiln.core.settings import Settings


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return load_model(Settings.default())
