"""Errors as HTTP responses: one body everywhere under /v1 and /v1/openai."""

from __future__ import annotations

import logging
import re

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kiln.core.errors import InternalError, KilnError, MethodNotAllowed, RouteNotFound, StoreFailed
from kiln.core.text import shorten
from kiln.http.counting import note_error
from kiln.http.refusal import Refusal
from kiln.wire.problems import ErrorBody, ErrorResponse

log = logging.getLogger(__name__)


def error_body(error: KilnError) -> bytes:
    """The JSON error body."""
    body = ErrorBody(
        message=error.message, type=error.type, param=error.param, code=error.code, hint=error.hint
    )
    return msgspec.json.encode(ErrorResponse(error=body))


def native_error_body(error: KilnError) -> bytes:
    """The error body of `/lmkit/v1`: `{"error": message, "code": code}`.

    It has no place for the field and the remedy, so the message says both.
    """
    named = error.param is None or re.search(rf"(?<!\w){re.escape(error.param)}(?!\w)", error.message)
    message = error.message if named else f"`{error.param}`: {error.message}"
    if error.hint is not None:
        message = f"{message.rstrip('.')}. {error.hint}"
    return msgspec.json.encode({"error": message, "code": error.code})


def error_response(request: Request, error: KilnError, headers: dict[str, str] | None = None) -> Response:
    if isinstance(error, StoreFailed):
        # Where the server keeps its files is for its operator to know.
        log.error("%s", error.message)
        error = StoreFailed("the store of keys and memory cannot be used")
    note_error(request, error)
    native = request.url.path.startswith("/lmkit/")
    headers = dict(headers or {})
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = 'Bearer realm="kiln"'
    return Refusal(
        native_error_body(error) if native else error_body(error),
        status_code=error.status,
        headers=headers,
        media_type="application/json",
    )


async def on_kiln_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, KilnError)
    return error_response(request, error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals, in the project's shape."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    path = shorten(request.url.path)
    if error.status_code == 404:
        return error_response(request, RouteNotFound(f"no route {path}"), headers)
    if error.status_code == 405:
        return error_response(
            request,
            MethodNotAllowed(f"{request.method} is not served on {path}"),
            headers,
        )
    log.error("unexpected HTTP exception: %s", error)
    return error_response(request, InternalError("the request could not be handled"))


async def on_unexpected(request: Request, error: Exception) -> Response:
    log.error("unexpected error on %s", request.url.path, exc_info=error)
    # Starlette raises the error again, whereupon uvicorn closes the connection: nothing should be sent on it.
    headers = {"connection": "close"}
    return error_response(request, InternalError("the server failed while handling the request"), headers)


async def on_disconnect(request: Request, error: Exception) -> Response:
    """The client went while it was sending: there is nobody to answer."""
    return Response(status_code=499)


EXCEPTION_HANDLERS = {
    ClientDisconnect: on_disconnect,
    KilnError: on_kiln_error,
    HTTPException: on_http_exception,
    Exception: on_unexpected,
}
