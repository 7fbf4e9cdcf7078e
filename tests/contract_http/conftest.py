"""Servers that the tests of this folder share. They run on threads of the test process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kiln.engine.sampling.sampler import Allowed, SequenceSampler
from servers.fixtures import contract_kept, stage, staged
from servers.scripted import Stage, Staged
from servers.server import FIXTURES

from .api import Api, model_api
from .reference import Reference

__all__ = ["contract_kept", "stage", "staged"]

Pick = Callable[[SequenceSampler, NDArray[np.float32], Allowed | None], tuple[int, float]]


@pytest.fixture(scope="session")
def api() -> Iterator[Api]:
    """The bundled model with default settings."""
    with model_api() as running:
        yield running


@pytest.fixture(scope="session")
def inline_api() -> Iterator[Api]:
    """The same with the engine on a thread of this process, where tests can break it on purpose."""
    with model_api(engine__mode="inline") as running:
        yield running


@pytest.fixture(scope="session")
def small_api() -> Iterator[Api]:
    """A context of 128 tokens."""
    with model_api(engine__ctx_size=128) as running:
        yield running


@pytest.fixture(scope="session")
def multi_close_api() -> Iterator[Api]:
    """A model whose tokenizer writes the close tag with several ordinary tokens."""
    path = FIXTURES / "multi-close.gguf"
    with model_api(model__path=str(path)) as running:
        yield running


@pytest.fixture(scope="session")
def reference() -> Iterator[Reference]:
    """The model of `api`, to compare with."""
    model = Reference(Path(str(files("kiln"))) / "models" / "tiny-reasoner-f16.gguf")
    yield model
    model.close()


@pytest.fixture
def scripted_api(staged: Staged, stage: Stage) -> Api:
    """Its model says what `stage` tells it."""
    return Api(staged.server)


@pytest.fixture
def before_pick(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, int], None]], None]:
    """Have a function run before every draw of an inline engine, with the choice's and the token's index.

    It may raise.
    """
    original: Pick = SequenceSampler.pick

    def install(hook: Callable[[int, int], None]) -> None:
        def pick(
            self: SequenceSampler, logits: NDArray[np.float32], allowed: Allowed | None = None
        ) -> tuple[int, float]:
            hook(self._request.choice_index, self._index)
            return original(self, logits, allowed)

        monkeypatch.setattr(SequenceSampler, "pick", pick)

    return install
