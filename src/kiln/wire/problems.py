"""The one error body of `/v1` and `/v1/openai`."""

from __future__ import annotations

from msgspec import Struct


class ErrorBody(Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str
    hint: str | None


class ErrorResponse(Struct, kw_only=True):
    error: ErrorBody
