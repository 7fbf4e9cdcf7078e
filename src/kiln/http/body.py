"""Reading a JSON request body within bounds."""

from __future__ import annotations

from starlette.requests import Request

from kiln.core.errors import BodyTooLarge, InvalidJson, UnsupportedMediaType
from kiln.core.text import shorten
from kiln.http.refusal import BODY_READ


async def read_json_body(request: Request, max_bytes: int) -> bytes:
    """The raw body. Raises UnsupportedMediaType, BodyTooLarge or InvalidJson (empty)."""
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json":
        stated = f"not {media_type!r}" if media_type else "but no content type was sent"
        raise UnsupportedMediaType(f"the body must be application/json, {stated}")
    declared = request.headers.get("content-length", "")
    digits = declared.lstrip("0")
    # Longer numbers are too large whatever they are, and costly to read.
    if digits.isdigit() and (len(digits) > 19 or int(digits) > max_bytes):
        raise BodyTooLarge(f"the body has {shorten(digits)} bytes, at most {max_bytes} are accepted")
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise BodyTooLarge(f"the body has more than {max_bytes} bytes")
        chunks.append(chunk)
    request.scope[BODY_READ] = True
    body = b"".join(chunks)
    if not body.strip():
        raise InvalidJson("the body is empty")
    return body
