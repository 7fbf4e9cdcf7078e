"""`/lmkit/v1/keys`: API keys, for admins."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kiln.access.book import KeyBook
from kiln.dialects.validate import decode
from kiln.http.body import read_json_body
from kiln.http.state import ServerState
from kiln.store.keys import Key, Scope

MAX_BODY_BYTES = 4096


class CreateKey(msgspec.Struct):
    """Body of POST /lmkit/v1/keys."""

    name: str
    scope: Scope = "inference"
    max_concurrency: int | None = None
    rate_per_minute: int | None = None


async def list_keys(request: Request) -> Response:
    """All keys, revoked ones too, oldest first."""
    return JSONResponse({"keys": [_shown(key) for key in await _book(request).keys()]})


async def create_key(request: Request) -> Response:
    """201 with the key and its secret, which is shown this once."""
    body = decode(await read_json_body(request, MAX_BODY_BYTES), CreateKey)
    key, secret = await _book(request).create(
        body.name,
        scope=body.scope,
        max_concurrency=body.max_concurrency,
        rate_per_minute=body.rate_per_minute,
    )
    return JSONResponse(
        {"key": _shown(key), "secret": secret}, status_code=201, headers={"cache-control": "no-store"}
    )


async def revoke_key(request: Request) -> Response:
    """Revoke the key that is in force under a name, and end its sessions."""
    return JSONResponse(_shown(await _book(request).revoke(request.path_params["name"])))


def _book(request: Request) -> KeyBook:
    state: ServerState = request.app.state.kiln
    return state.access.book


def _shown(key: Key) -> dict[str, Any]:
    return {name: value for name, value in asdict(key).items() if name != "id"}
