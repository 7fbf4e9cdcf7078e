"""`/v1/openai`: embeddings, and the list of models with the embedding model in it."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from kiln.core.errors import ModelNotFound, RequestError
from kiln.core.text import shorten
from kiln.dialects.openai.embeddings import decode_embedding, to_embedding_response
from kiln.dialects.openai.text_request import read_prompts
from kiln.http.body import read_json_body
from kiln.http.routes.meta import model_entry
from kiln.http.sse import unless_disconnected
from kiln.http.state import ServerState
from kiln.wire import openai_text as wire


async def embeddings(request: Request) -> Response:
    state: ServerState = request.app.state.kiln
    began = time.monotonic()
    try:
        response, inputs, tokens = await _embeddings(request, state)
    except ClientDisconnect:
        state.metrics.not_embedded("cancelled")
        return Response(status_code=499)
    except Exception as error:
        state.metrics.not_embedded("refused" if isinstance(error, RequestError) else "failed")
        raise
    state.metrics.embedded(inputs, tokens, time.monotonic() - began)
    return response


async def _embeddings(request: Request, state: ServerState) -> tuple[Response, int, int]:
    """The answer, its inputs and their tokens. Raises ClientDisconnect."""
    service = state.embeddings
    body = await read_json_body(request)

    def read() -> tuple[wire.EmbeddingRequest, list[tuple[int, ...]]]:
        wanted = decode_embedding(body)
        inputs = read_prompts(wanted.input, "input")
        return wanted, service.read(inputs, model=wanted.model, dimensions=wanted.dimensions)

    wanted, inputs = await unless_disconnected(request.receive, state.service.in_worker(read))
    vectors = await unless_disconnected(request.receive, service.embed(inputs))
    assert service.embedder is not None
    name, tokens = service.embedder.id, sum(len(ids) for ids in inputs)

    def encode() -> bytes:
        in_base64 = wanted.encoding_format == "base64"
        return msgspec.json.encode(to_embedding_response(vectors, tokens, name, in_base64=in_base64))

    encoded = await state.service.in_worker(encode)
    return Response(encoded, media_type="application/json"), len(inputs), tokens


async def list_models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": list(_entries(request).values())})


async def show_model(request: Request) -> Response:
    name = request.path_params["model"]
    entry = _entries(request).get(name)
    if entry is None:
        raise ModelNotFound(f"the model {shorten(name)} is not served here")
    return JSONResponse(entry)


def _entries(request: Request) -> dict[str, dict[str, object]]:
    """The models of the catalog, and the embedding model."""
    state: ServerState = request.app.state.kiln
    names = list(state.catalog.states())
    if state.embeddings.embedder is not None:
        names.append(state.embeddings.embedder.id)
    return {name: model_entry(state.catalog, name) for name in names}
