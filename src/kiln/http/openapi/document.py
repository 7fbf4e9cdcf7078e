"""The OpenAPI 3.1 document of the HTTP surface, and the routes that publish it and the contracts.

Schemas of the inference routes are the contracts' own definitions; those of errors, settings and the
other bodies come from their structs and declarations. Nothing is described twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from kiln import contracts
from kiln.core.errors import RouteNotFound
from kiln.core.text import shorten
from kiln.http.openapi import (
    access,
    adapters,
    memory,
)
from kiln.http.openapi.native import native_paths
from kiln.http.openapi.openai import openai_paths
from kiln.http.openapi.parts import Json, inference, ref, responses, schemas

_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'"


async def contract_route(request: Request) -> Response:
    """GET /contracts/{name}"""
    name = request.path_params["name"]
    try:
        content = contracts.load(name)
    except KeyError:
        known = ", ".join(contracts.names())
        raise RouteNotFound(f"no contract {shorten(name)}", hint=f"The contracts are {known}.") from None
    return Response(content, media_type="application/json")


async def openapi_route(request: Request) -> Response:
    """GET /openapi.json"""
    return Response(_document_bytes(), media_type="application/json")


async def docs_page(request: Request) -> Response:
    """GET /docs: the document as a page, complete in itself."""
    return HTMLResponse(page(), headers={"content-security-policy": _PAGE_POLICY})


@cache
def page() -> str:
    """The page, with the document inside it."""
    template = (files("kiln.http.openapi") / "page.html").read_text(encoding="utf-8")
    # A closing tag inside a text of the document must not end the script element that holds it.
    return template.replace("{{DOCUMENT}}", _document_bytes().decode("utf-8").replace("</", "<\\/"))


@cache
def _document_bytes() -> bytes:
    return json.dumps(openapi_document(), ensure_ascii=False).encode("utf-8")


def openapi_document() -> Json:
    """The whole document, made anew at each call."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kiln",
            "version": _version(),
            "summary": "Serves open reasoning models whose thinking can be budgeted.",
            "description": "Requests may carry unknown fields, which are ignored; responses carry described"
            " fields only. Every refusal under /v1 has one error body, which names the field and a remedy;"
            " those under /lmkit/v1 have a shorter one, whose message says both.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [
            {"name": "inference", "description": "The Kiln inference contract, version 1."},
            {"name": "native", "description": "The native chat of `/lmkit/v1`."},
            {"name": "openai", "description": "The profile for OpenAI's clients."},
            {"name": "exchange", "description": "Acting on an exchange that is running."},
            {"name": "catalog", "description": "Skills and agents that a native chat may name."},
            {"name": "adapters", "description": "LoRA adapters of the default model."},
            {"name": "memory", "description": "What is remembered, for the person whose it is."},
            {"name": "access", "description": "Who the caller is."},
            {"name": "server", "description": "What is served, how it is configured, how it is doing."},
        ],
        "security": access.SECURITY,
        "paths": access.with_refusals(_paths() | adapters.paths() | access.paths() | memory.paths()),
        "components": {
            "schemas": schemas() | adapters.schemas() | access.schemas() | memory.schemas(),
            "responses": responses(),
            "securitySchemes": access.SCHEMES,
        },
    }


def _version() -> str:
    try:
        return version("kiln")
    except PackageNotFoundError:
        return "0"


# Paths.

_GENERATES = (400, 404, 408, 413, 415, 429, 500, 503, 504)


def _paths() -> Json:
    return {
        "/v1/chat/completions": {"post": _chat()},
        "/v1/completions/batch": {
            "post": _posts(
                "createBatchCompletion",
                "Complete several conversations",
                "Prompts times n make at most 64 completions. One that fails ends with `error` and does not"
                " touch the others.",
                "BatchCompletionRequest",
                {"200": _json("Every completion.", ref("BatchCompletionResponse"))},
                _GENERATES,
            )
        },
        "/v1/completions": {
            "post": _posts(
                "scorePrompt",
                "Score the tokens of a prompt",
                "Log-probabilities of the prompt's own tokens and of the likeliest others. Nothing is"
                " generated.",
                "TextCompletionRequest",
                {"200": _json("The scores.", ref("TextCompletionResponse"))},
                _GENERATES,
            )
        },
        "/v1/models": {"get": _gets("listModels", "List the served models", "ModelList", "The models.")},
        "/v1/models/{model}": {
            "get": {
                **_gets("getModel", "Show a served model", "Model", "The model."),
                "parameters": [
                    {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
                ],
            }
        },
        "/v1/config": {
            "get": _gets(
                "getConfig",
                "Show every setting with its source",
                "Configuration",
                "The settings, and what they resolved to for the served model.",
            )
        },
        "/v1/stats/recent-requests": {
            "get": _gets(
                "listRecentRequests",
                "List the last completions",
                "RecentRequests",
                "Newest first: budgets, outcomes and latencies; no text.",
            )
        },
        "/v1/stats/decode": {
            "get": _gets(
                "getDecodeStatistics",
                "Show inter-token latency",
                "DecodeStatistics",
                "Gaps between tokens in the last 60 seconds.",
            )
        },
        **openai_paths(),
        "/health": {"get": _health()},
        "/metrics": {"get": _metrics()},
        "/contracts/{name}": {"get": _contract()},
        "/openapi.json": {
            "get": _gets("getOpenapi", "This document", "OpenapiDocument", "The document.", tag="server")
        },
        "/docs": {"get": _docs()},
        "/lmkit/v1/models": {
            "get": _gets(
                "listCatalog",
                "List the models of the catalog",
                "Catalog",
                "The default model first; one that is not loaded is loaded when a request names it.",
                tag="exchange",
            )
        },
        "/lmkit/v1/skills": {
            "get": _catalog("listSkills", "List the skills", "SkillList", "Skills; broken ones say why.")
        },
        "/lmkit/v1/agents": {
            "get": _catalog("listAgents", "List the agents", "AgentList", "Agents; broken ones say why.")
        },
        **native_paths(),
    }


def _chat() -> Json:
    responses = {
        "200": {
            "description": "The completion; with `stream: true`, its events.",
            "content": {
                "application/json": _media(ref("ChatCompletionResponse")),
                "text/event-stream": {"schema": ref("ChatCompletionChunkStream")},
            },
        }
    }
    return _posts(
        "createChatCompletion",
        "Continue a conversation",
        "Answers whole, or with `stream: true` as server-sent events. A request that fails before its first"
        " token is answered with an HTTP error, a later failure with one error event.",
        "ChatCompletionRequest",
        responses,
        _GENERATES,
    )


def _catalog(operation_id: str, summary: str, body: str, description: str) -> Json:
    operation = _gets(operation_id, summary, body, description, tag="catalog")
    operation["responses"] = {"200": _json(description, ref(body)), **_native_problems((429, 500))}
    return operation


def _health() -> Json:
    operation = _gets("getHealth", "Whether the server answers", "Health", "It does.")
    operation["responses"]["503"] = _json("It shuts down, or its engine failed or restarts.", ref("Health"))
    return operation


def _metrics() -> Json:
    return {
        "operationId": "getMetrics",
        "tags": ["server"],
        "summary": "Metrics for Prometheus",
        "responses": {
            "200": {
                "description": "The text exposition.",
                "content": {"text/plain": {"schema": {"type": "string"}}},
            }
        },
    }


def _contract() -> Json:
    operation = _gets("getContract", "One of the wire contracts", "ContractDocument", "The contract.")
    schema = {"type": "string", "enum": list(contracts.names())}
    operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": schema}]
    operation["responses"] |= _problems((404,))
    return operation


def _docs() -> Json:
    return {
        "operationId": "getDocs",
        "tags": ["server"],
        "summary": "This document as a page",
        "responses": {
            "200": {"description": "The page.", "content": {"text/html": {"schema": {"type": "string"}}}}
        },
    }


def _posts(
    operation_id: str,
    summary: str,
    description: str,
    body: str,
    responses: Json,
    statuses: Iterable[int],
) -> Json:
    return {
        "operationId": operation_id,
        "tags": ["inference"],
        "summary": summary,
        "description": description,
        "requestBody": {"required": True, "content": {"application/json": _media(ref(body))}},
        "responses": {**responses, **_problems(statuses)},
    }


def _gets(operation_id: str, summary: str, body: str, description: str, tag: str = "server") -> Json:
    return {
        "operationId": operation_id,
        "tags": [tag],
        "summary": summary,
        "responses": {"200": _json(description, ref(body)), **_problems((500,))},
    }


def _json(description: str, schema: Json) -> Json:
    return {"description": description, "content": {"application/json": _media(schema)}}


def _media(schema: Json) -> Json:
    """A media type with the contract's examples, where it has some."""
    found = inference()["x-kiln-examples"].get(schema["$ref"].rsplit("/", 1)[1], [])
    if not found:
        return {"schema": schema}
    examples = {f"example{i}": {"value": value} for i, value in enumerate(found, start=1)}
    return {"schema": schema, "examples": examples}


def _problems(statuses: Iterable[int]) -> Json:
    return {str(status): {"$ref": f"#/components/responses/Error{status}"} for status in statuses}


def _native_problems(statuses: Iterable[int]) -> Json:
    return {str(status): {"$ref": f"#/components/responses/NativeError{status}"} for status in statuses}
