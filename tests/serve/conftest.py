"""Servers that the tests of this folder share. They run on threads of the test process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kiln.backends.llamacpp import LlamaModel
from kiln.chat.models.served import ServedModel
from kiln.cli.assembly import describe_model, load_model
from servers.fixtures import contract_kept, stage, staged
from servers.scripted import Stage, Staged
from servers.server import FIXTURES, Server, serving_model, settings_of

__all__ = ["contract_kept", "stage", "staged"]


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The bundled model with default settings."""
    with serving_model() as running:
        yield running


@pytest.fixture(scope="session")
def budgeting_server() -> Iterator[Server]:
    """Both budgets have a default."""
    with serving_model(
        server__default_thinking_budget_tokens=8, server__default_thinking_budget_ms=60_000
    ) as running:
        yield running


@pytest.fixture(scope="session")
def small_server() -> Iterator[Server]:
    """A context of 128 tokens."""
    with serving_model(engine__ctx_size=128) as running:
        yield running


@pytest.fixture(scope="session")
def narrow_server() -> Iterator[Server]:
    """Two sequences, and room for eight more to wait."""
    with serving_model(engine__parallel=2, engine__max_queue=8) as running:
        yield running


@pytest.fixture(scope="session")
def quiet_server() -> Iterator[Server]:
    """Requests do not think unless they ask for it."""
    with serving_model(server__default_thinking_enabled=False) as running:
        yield running


@pytest.fixture(scope="session")
def multi_close_server() -> Iterator[Server]:
    """A model whose tokenizer writes the close tag with several ordinary tokens."""
    with serving_model(model__path=str(FIXTURES / "multi-close.gguf")) as running:
        yield running


@pytest.fixture
def scripted_server(staged: Staged, stage: Stage) -> Server:
    """Its model says what `stage` tells it."""
    return staged.server


@pytest.fixture(scope="module")
def llama() -> Iterator[LlamaModel]:
    """The bundled model without a server."""
    model = load_model(settings_of())
    yield model
    model.close()


@pytest.fixture(scope="module")
def model(llama: LlamaModel) -> ServedModel:
    return describe_model(settings_of(), llama)


@pytest.fixture(scope="session")
def held_out() -> list[dict[str, Any]]:
    """Problems that the model never saw: prompt, answer, number of terms."""
    problems: list[dict[str, Any]] = json.loads((FIXTURES / "heldout.json").read_text("utf-8"))
    return problems


@pytest.fixture(scope="session")
def reference() -> list[dict[str, Any]]:
    """What transformers wrote for 50 prompts, greedily."""
    cases: list[dict[str, Any]] = json.loads((FIXTURES / "reference.json").read_text("utf-8"))["cases"]
    return cases
