"""Embeddings, with the bundled model as the embedding model: its mean-pooled states are vectors like any."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from servers import traffic
from servers.raw import connected
from servers.server import Server, serving_model, wait_until

from .conftest import Profile

PATH = str(files("kiln") / "models" / "tiny-reasoner-f16.gguf")
MODEL = "tiny-reasoner-f16"
TEXTS = ["3+8-2+7=?", "The answer is 16.", "a", "Hello there! " * 40]


@pytest.fixture(scope="module")
def embedding_server() -> Iterator[Server]:
    with serving_model(embedding__model_path=PATH) as running:
        yield running


@pytest.fixture
def embedding(embedding_server: Server) -> Profile:
    return Profile(embedding_server)


def embed(profile: Profile, value: Any, **fields: Any) -> NDArray[np.float64]:
    response = profile.post("embeddings", input=value, model=MODEL, **fields)
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    return np.array([entry["embedding"] for entry in data])


def test_vectors_are_of_unit_length_and_in_order(embedding: Profile) -> None:
    together = embed(embedding, TEXTS)
    assert together.shape == (4, 128)
    assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    alone = np.concatenate([embed(embedding, text) for text in TEXTS])
    assert np.allclose(together, alone, atol=2e-3)
    assert (together @ alone.T).argmax(axis=1).tolist() == [0, 1, 2, 3]


def test_more_inputs_than_a_call_takes(embedding: Profile) -> None:
    texts = [f"{i}+{i}=?" for i in range(70)]
    many = embed(embedding, texts)
    assert np.allclose(many[69:], embed(embedding, texts[69]), atol=2e-3)
    usage = embedding.post("embeddings", input=texts).json()["usage"]
    counts = [embedding.post("tokenize", prompt=text).json()["count"] for text in texts[:3]]
    assert usage["prompt_tokens"] == usage["total_tokens"] >= 70 * min(counts)


def test_token_ids_and_base64(embedding: Profile) -> None:
    plain = embed(embedding, TEXTS[0])
    ids = embedding.post("tokenize", prompt=TEXTS[0]).json()["tokens"]
    assert np.array_equal(embed(embedding, ids), plain)
    assert np.array_equal(embed(embedding, [ids, ids])[:1].round(3), plain.round(3))
    body = embedding.post("embeddings", input=TEXTS[0], encoding_format="base64", dimensions=128).json()
    decoded = np.frombuffer(base64.b64decode(body["data"][0]["embedding"]), "<f4")
    assert np.array_equal(decoded, plain[0].astype(np.float32))
    assert body["model"] == MODEL


def test_the_client(embedding_server: Server) -> None:
    with traffic.client("") as http_client:
        client = openai.OpenAI(
            base_url=f"{embedding_server.url}/v1/openai",
            api_key="none",
            http_client=http_client,  # type: ignore[arg-type]
        )
        found = client.embeddings.create(model=MODEL, input=TEXTS)
        models = [model.id for model in client.models.list()]
    assert [len(entry.embedding) for entry in found.data] == [128] * 4
    assert models == ["tiny-reasoner", MODEL]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("input", {"input": []}),
        ("input", {"input": ""}),
        ("input[1]", {"input": ["a", ""]}),
        ("input", {"input": [100_000]}),
        ("input", {"input": "1 " * 5000}),
        ("input", {"input": "x" * 500_000}),
        ("input", {"input": ["a"] * 2049}),
        ("dimensions", {"input": "a", "dimensions": 64}),
        ("encoding_format", {"input": "a", "encoding_format": "int8"}),
    ],
)
def test_refusals(embedding: Profile, param: str, fields: dict[str, Any]) -> None:
    assert embedding.refuse("embeddings", **fields)["param"] == param


def test_no_such_model(embedding: Profile, profile: Profile) -> None:
    response = embedding.post("embeddings", input="a", model="text-embedding-3-small")
    assert response.status_code == 404
    served = {model["id"] for model in embedding.server.client.get("/v1/openai/models").json()["data"]}
    assert any(name in response.json()["error"]["hint"] for name in served - {"tiny-reasoner"})
    response = profile.post("embeddings", input="a", model="any")
    assert response.status_code == 404
    assert "embedding.model_path" in response.json()["error"]["hint"]


def test_requests_are_counted(embedding: Profile) -> None:
    def read() -> dict[str, float]:
        lines = embedding.server.client.get("/metrics").text.splitlines()
        named = [line.rpartition(" ") for line in lines if line.startswith("kiln_embedding_")]
        return {name: float(value) for name, _, value in named if "_created" not in name}

    embed(embedding, TEXTS)
    embedding.refuse("embeddings", input="")
    before = read()
    embed(embedding, TEXTS)
    usage = embedding.post("embeddings", input=[[1, 2], [3, 4, 5]]).json()["usage"]
    assert usage["prompt_tokens"] == 5
    tokens = embedding.post("embeddings", input=TEXTS).json()["usage"]["prompt_tokens"]
    embedding.refuse("embeddings", input="")
    embedding.post("embeddings", input="a", model="another")
    after = read()
    grown = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert grown.pop("kiln_embedding_request_seconds_sum") > 0
    assert all("_bucket" in name or name in {
        'kiln_embedding_requests_total{outcome="done"}',
        'kiln_embedding_requests_total{outcome="refused"}',
        "kiln_embedding_inputs_total",
        "kiln_embedding_tokens_total",
        "kiln_embedding_request_seconds_count",
    } for name in grown)  # fmt: skip
    assert grown['kiln_embedding_requests_total{outcome="done"}'] == 3
    assert grown['kiln_embedding_requests_total{outcome="refused"}'] == 2
    assert grown["kiln_embedding_request_seconds_count"] == 3
    assert grown["kiln_embedding_inputs_total"] == 2 * len(TEXTS) + 2
    assert grown["kiln_embedding_tokens_total"] == 2 * tokens + 5


def test_a_client_that_leaves_is_counted(embedding: Profile) -> None:
    def left() -> float:
        text = embedding.server.client.get("/metrics").text
        name = 'kiln_embedding_requests_total{outcome="cancelled"} '
        return sum(float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name))

    before = left()
    head = b"host: kiln\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    with connected(embedding.server.url) as connection:
        connection.sendall(b"POST /v1/openai/embeddings HTTP/1.1\r\n" + head)
    wait_until(lambda: left() == before + 1, "it is counted")
