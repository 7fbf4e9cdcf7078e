"""The Starlette application: routes, error handlers, lifespan."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kiln.http.counting import counting
from kiln.http.guard import Guard
from kiln.http.openapi import document
from kiln.http.problems import EXCEPTION_HANDLERS
from kiln.http.routes import (
    adapters,
    catalog,
    completions,
    keys,
    kiln,
    lmkit,
    memory,
    meta,
    openai,
    openai_models,
    openai_text,
    session,
)
from kiln.http.sse import DIRECT_SEND
from kiln.http.state import ServerState

ROUTES = [
    Route("/v1/chat/completions", kiln.chat_completions, methods=["POST"]),
    Route("/v1/completions/batch", completions.batch_completions, methods=["POST"]),
    Route("/v1/completions", completions.score_prompt, methods=["POST"]),
    Route("/v1/adapters", adapters.list_adapters, methods=["GET"]),
    Route("/v1/adapters/load", adapters.load_adapter, methods=["POST"]),
    Route("/v1/adapters/unload", adapters.unload_adapter, methods=["POST"]),
    Route("/v1/adapters/upload", adapters.upload_adapter, methods=["POST"]),
    Route("/v1/adapters/merge", adapters.merge_adapters, methods=["POST"]),
    Route("/v1/adapters/{name:path}/download", adapters.download_adapter, methods=["GET"]),
    Route("/v1/adapters/{name:path}", adapters.delete_adapter, methods=["DELETE"]),
    Route("/v1/models", meta.list_models, methods=["GET"]),
    Route("/v1/models/{model:path}", meta.show_model, methods=["GET"]),
    Route("/v1/config", meta.config, methods=["GET"]),
    Route("/v1/stats/recent-requests", meta.recent_requests, methods=["GET"]),
    Route("/v1/stats/decode", meta.decode_stats, methods=["GET"]),
    Route("/v1/openai/chat/completions", openai.chat_completions, methods=["POST"]),
    Route("/v1/openai/completions", openai_text.completions, methods=["POST"]),
    Route("/v1/openai/tokenize", openai_text.tokenize, methods=["POST"]),
    Route("/v1/openai/detokenize", openai_text.detokenize, methods=["POST"]),
    Route("/v1/openai/embeddings", openai_models.embeddings, methods=["POST"]),
    Route("/v1/openai/models", openai_models.list_models, methods=["GET"]),
    Route("/v1/openai/models/{model:path}", openai_models.show_model, methods=["GET"]),
    Route("/health", meta.health, methods=["GET"]),
    Route("/metrics", meta.metrics, methods=["GET"]),
    Route("/contracts/{name}", document.contract_route, methods=["GET"]),
    Route("/openapi.json", document.openapi_route, methods=["GET"]),
    Route("/docs", document.docs_page, methods=["GET"]),
    Route("/lmkit/v1/models", meta.native_models, methods=["GET"]),
    Route("/lmkit/v1/skills", catalog.list_skills, methods=["GET"]),
    Route("/lmkit/v1/agents", catalog.list_agents, methods=["GET"]),
    Route("/lmkit/v1/memory", memory.list_memories, methods=["GET"]),
    Route("/lmkit/v1/memory/{memory_id}", memory.list_facts, methods=["GET"]),
    Route("/lmkit/v1/memory/{memory_id}", memory.write_fact, methods=["POST"]),
    Route("/lmkit/v1/memory/{memory_id}", memory.clear_memory, methods=["DELETE"]),
    Route("/lmkit/v1/memory/{memory_id}/export", memory.export_memory, methods=["GET"]),
    Route("/lmkit/v1/memory/{memory_id}/{fact_id}", memory.delete_fact, methods=["DELETE"]),
    Route("/lmkit/v1/keys", keys.list_keys, methods=["GET"]),
    Route("/lmkit/v1/keys", keys.create_key, methods=["POST"]),
    Route("/lmkit/v1/keys/{name}", keys.revoke_key, methods=["DELETE"]),
    Route("/lmkit/v1/session", session.begin_session, methods=["POST"]),
    Route("/lmkit/v1/session", session.show_session, methods=["GET"]),
    Route("/lmkit/v1/session", session.end_session, methods=["DELETE"]),
    Route("/lmkit/v1/chat", lmkit.native_chat, methods=["POST"]),
    Route("/lmkit/v1/chat/skip-thinking", lmkit.skip_thinking, methods=["POST"]),
]


def build_app(start: Callable[[], Awaitable[ServerState]], *, cors_origins: Sequence[str] = ()) -> Starlette:
    """The application. `start` loads the model and starts the engine, and runs once the loop runs."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        state = await start()
        app.state.kiln = state
        try:
            yield
        finally:
            await state.drain()
            await state.memory.close()
            await state.embeddings.close()
            await state.catalog.close()
            await state.toolbox.aclose()
            await state.access.book.close()

    middleware: list[Middleware] = []
    if cors_origins:
        # Before the guard: a browser asks for leave without a key, and may read why it was refused.
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=cors_origins,
                allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
                allow_headers=["authorization", "content-type", "x-api-key"],
                expose_headers=["retry-after"],
            )
        )
    return _App(
        routes=ROUTES,
        exception_handlers=EXCEPTION_HANDLERS,
        middleware=[*middleware, Middleware(Guard)],
        lifespan=lifespan,
    )


class _App(Starlette):
    """Counts responses outside all layers, Starlette's own included, which answers what nobody expected.

    It also notes the server's own `send`: what streams many small pieces may leave out every layer in
    between, once its response has begun."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope[DIRECT_SEND] = send
            send = counting(scope, send, self.state.kiln.metrics)
        await super().__call__(scope, receive, send)
