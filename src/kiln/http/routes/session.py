"""`/lmkit/v1/session`: a browser trades an API key for a cookie that its scripts cannot read."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kiln.access.origin import is_cross_site
from kiln.core.access import Identity
from kiln.core.errors import CrossSiteRefused, InvalidKey
from kiln.dialects.validate import decode
from kiln.http.body import read_json_body
from kiln.http.guard import COOKIE, AccessPolicy, identity_of_key, session_secret
from kiln.http.state import ServerState
from kiln.store.keys import Session

MAX_BODY_BYTES = 4096


class BeginSession(msgspec.Struct):
    """Body of POST /lmkit/v1/session."""

    key: str


async def begin_session(request: Request) -> Response:
    """201 with a cookie that stands for the key until it expires, is ended, or the key is revoked."""
    state, policy = _checked(request)
    body = decode(await read_json_body(request, MAX_BODY_BYTES), BeginSession)
    key = await policy.book.key_of(body.key)
    if key is None:
        raise InvalidKey("the API key is not in force", param="key")
    session, secret = await policy.book.begin_session(key, state.settings.auth.session_hours * 3600)
    response = JSONResponse(_shown(identity_of_key(key), session), status_code=201)
    response.set_cookie(
        COOKIE,
        secret,
        max_age=max(1, int(session.expires_at - time.time())),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    response.headers["cache-control"] = "no-store"
    return response


async def show_session(request: Request) -> Response:
    """Who the caller is, by whatever they sent. Raises MissingKey or InvalidKey where they are nobody."""
    _, policy = _checked(request)
    identity, _ = await policy.caller(request.method, request.headers)
    secret = session_secret(request.headers)
    found = await policy.book.session_of(secret) if secret is not None else None
    own = found[0] if found is not None and found[1].name == identity.owner else None
    return JSONResponse(_shown(identity, own), headers={"cache-control": "no-store"})


async def end_session(request: Request) -> Response:
    """204, whether or not there was a session."""
    _, policy = _checked(request)
    secret = session_secret(request.headers)
    if secret is not None:
        await policy.book.end_session(secret)
    response = Response(status_code=204)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict", secure=request.url.scheme == "https")
    return response


def _checked(request: Request) -> tuple[ServerState, AccessPolicy]:
    """The guard leaves this route open, so what it would have refused is refused here."""
    state: ServerState = request.app.state.kiln
    if is_cross_site(request.method, request.headers, state.access.trusted_origins):
        raise CrossSiteRefused("the request was sent by a page of another site")
    return state, state.access


def _shown(identity: Identity, session: Session | None) -> dict[str, object]:
    expires = None if session is None else int(session.expires_at)
    return {"name": identity.name, "scopes": list(identity.scopes), "session_expires_at": expires}
