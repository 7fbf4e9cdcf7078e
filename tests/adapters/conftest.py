"""What the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from threadpoolctl import threadpool_limits

from kiln.adapters.base import BaseModel, read_base
from kiln.adapters.registry import AdapterRegistry
from kiln.adapters.storage import Storage

from .native import NativeModel
from .samples import MODEL, cheerful, scaled
from .server import AdapterServer, adapter_server

MakeRegistry = Callable[..., AdapterRegistry]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine the threads of the linear algebra library wait for each other."""
    with threadpool_limits(1, user_api="blas"):
        yield


@pytest.fixture(scope="session")
def base() -> BaseModel:
    return read_base(MODEL)


@pytest.fixture
def native() -> Iterator[NativeModel]:
    model = NativeModel(MODEL)
    yield model
    model.close()


@pytest.fixture
def make_registry(tmp_path: Path, base: BaseModel) -> Iterator[MakeRegistry]:
    """Registries over the folder `saved`; each new one is like another start of the server."""
    made: list[AdapterRegistry] = []

    def make(**limits: int) -> AdapterRegistry:
        storage = Storage(tmp_path / "saved", quota=limits.get("quota"))
        registry = AdapterRegistry(storage, lambda: base, max_bytes=limits.get("max_bytes", 1 << 30))
        registry.start()
        made.append(registry)
        return registry

    yield make
    for registry in made:
        registry.close()


@pytest.fixture
def registry(make_registry: MakeRegistry) -> AdapterRegistry:
    return make_registry()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterServer]:
    """A server with the bundled adapter as `cheerful`, and one of half its delta as `calm`."""
    saved = tmp_path_factory.mktemp("adapters") / "saved"
    cheerful(saved / "cheerful")
    scaled(saved / "calm", 0.5)
    with adapter_server(saved) as running:
        yield running
