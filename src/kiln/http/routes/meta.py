"""Models, health, configuration and metrics."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kiln.chat.models.catalog import ModelCatalog
from kiln.core.errors import ModelNotFound
from kiln.core.settings import settings_as_json
from kiln.core.text import shorten
from kiln.http.state import ServerState


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.kiln
    return state


async def list_models(request: Request) -> Response:
    catalog = state_of(request).catalog
    return JSONResponse({"object": "list", "data": [model_entry(catalog, name) for name in catalog.states()]})


async def show_model(request: Request) -> Response:
    catalog, name = state_of(request).catalog, request.path_params["model"]
    if name not in catalog.states():
        raise ModelNotFound(f"the model {shorten(name)} is not served here")
    return JSONResponse(model_entry(catalog, name))


def model_entry(catalog: ModelCatalog, name: str) -> dict[str, object]:
    """A model as `/v1/models` lists it, loaded or not."""
    return {"id": name, "object": "model", "created": catalog.created, "owned_by": "kiln"}


async def native_models(request: Request) -> Response:
    """GET /lmkit/v1/models: every model with its state; the default one first."""
    catalog = state_of(request).catalog
    default = next(iter(catalog.states()))
    models = [
        {"id": name, "state": model_state, "default": name == default}
        for name, model_state in catalog.states().items()
    ]
    return JSONResponse({"models": models})


async def health(request: Request) -> Response:
    service = state_of(request).service
    if service.is_draining:
        return JSONResponse({"status": "draining"}, status_code=503)
    if not service.engine.is_alive:
        return JSONResponse({"status": "engine_failed"}, status_code=503)
    if service.engine.is_restarting:
        return JSONResponse({"status": "engine_restarting"}, status_code=503)
    return JSONResponse({"status": "ok"})


async def config(request: Request) -> Response:
    """Every setting with its source, and what it resolved to for the served model."""
    state = state_of(request)
    return JSONResponse({"settings": settings_as_json(state.settings), "resolved": state.resolved()})


async def metrics(request: Request) -> Response:
    return Response(state_of(request).metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})


async def recent_requests(request: Request) -> Response:
    """The last completions, newest first: budgets, outcomes and latencies, no text."""
    return JSONResponse({"requests": state_of(request).statistics.recent_requests()})


async def decode_stats(request: Request) -> Response:
    """Inter-token latency of the last minute."""
    return JSONResponse(state_of(request).statistics.decode_window())
