"""Reading a JSON request body within bounds."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from kiln.core.errors import BodyTooLarge, BodyTooSlow, InvalidJson, UnsupportedMediaType
from kiln.http.refusal import BODY_READ


async def read_json_body(request: Request, max_bytes: int | None = None) -> bytes:
    """The raw body, of at most `max_bytes` (unset, those of the configuration).

    Raises UnsupportedMediaType, BodyTooLarge, BodyTooSlow or InvalidJson (empty).
    """
    limits = request.app.state.kiln.settings.server
    hint = None if max_bytes is None else "Send a smaller request."
    if max_bytes is None:
        max_bytes = limits.max_body_bytes
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json":
        stated = f"not {media_type!r}" if media_type else "but no content type was sent"
        raise UnsupportedMediaType(f"the body must be application/json, {stated}")
    declared = request.headers.get("content-length", "")
    digits = declared.lstrip("0")
    # Longer numbers are too large whatever they are, and costly to read.
    if digits.isdigit() and (len(digits) > 19 or int(digits) > max_bytes):
        raise BodyTooLarge(f"the body has {digits[:24]} bytes, at most {max_bytes} are accepted", hint=hint)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > max_bytes:
                    raise BodyTooLarge(f"the body has more than {max_bytes} bytes", hint=hint)
                chunks.append(chunk)
    except TimeoutError:
        raise BodyTooSlow(f"the body was not complete after {limits.body_timeout_s:g} seconds") from None
    request.scope[BODY_READ] = True
    body = b"".join(chunks)
    if not body.strip():
        raise InvalidJson("the body is empty")
    return body
