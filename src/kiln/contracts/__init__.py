"""The wire contracts as data: JSON Schemas and conformance vectors, packaged with kiln.

Imports nothing of kiln. The server publishes the files at `/contracts/{name}`, `kiln contracts`
prints them, and the tests hold the code against them.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

INFERENCE = "kiln-inference-v1.schema.json"
THINKING_BUDGET = "thinking-budget-v1.schema.json"
OPENAI_CHUNK = "openai-chat-chunk-v1.schema.json"
THINKING_BUDGET_VECTORS = "thinking-budget-v1.conformance.json"


@cache
def names() -> tuple[str, ...]:
    """File names of all contracts, sorted."""
    return tuple(sorted(f.name for f in files(__name__).iterdir() if f.name.endswith(".json")))


@cache
def load(name: str) -> bytes:
    """The content of one contract, JSON in UTF-8. Raises KeyError for a name that is not in `names()`."""
    if name not in names():
        raise KeyError(name)
    return (files(__name__) / name).read_bytes()
