"""`/v1/adapters`: listing, saving, merging and deleting LoRA adapters of the default model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from typing import BinaryIO, TypeVar
from urllib.parse import quote

import msgspec
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive

from kiln.adapters.library import download, merge_into, upload
from kiln.adapters.names import check_name
from kiln.adapters.registry import AdapterRegistry, Known
from kiln.adapters.revision import Revision
from kiln.adapters.storage import disk_errors
from kiln.core.errors import BodyTooLarge, InvalidField, UnsupportedMediaType
from kiln.dialects.validate import decode
from kiln.http.body import read_json_body
from kiln.http.refusal import BODY_READ
from kiln.http.state import ServerState
from kiln.wire import adapters as wire

# What a multipart body has beside the archive.
_FORM_BYTES = 64 * 1024
_CHUNK = 256 * 1024

T = TypeVar("T", bound=msgspec.Struct)


async def list_adapters(request: Request) -> Response:
    """GET /v1/adapters"""
    registry = _registry(request)

    def listing() -> wire.AdapterList:
        return wire.AdapterList(
            default=registry.default,
            data=[_entry(registry, entry.name, entry.known) for entry in registry.entries()],
            disk=wire.AdapterDisk(used_bytes=registry.used_bytes, quota_bytes=registry.quota),
        )

    return await _answer(listing)


async def load_adapter(request: Request) -> Response:
    """POST /v1/adapters/load: make an adapter the server's default."""
    registry = _registry(request)
    body = await _body(request, wire.AdapterName)
    name = check_name(body.name, "name")

    def load() -> wire.AdapterDefault:
        registry.load_default(name)
        return wire.AdapterDefault(default=name)

    return await _answer(load)


async def unload_adapter(request: Request) -> Response:
    """POST /v1/adapters/unload: make the base model the server's default. The body is not read."""
    _registry(request).load_default(None)
    return _respond(wire.AdapterDefault(default=None))


async def upload_adapter(request: Request) -> Response:
    """POST /v1/adapters/upload: save a `.tar.gz`."""
    registry = _registry(request)
    registry.check_served()
    async with _Form(request, registry.max_bytes) as form:
        name = form.get("name")
        archive = form.get("archive")
        if len(form.getlist("name")) > 1:
            raise InvalidField("`name` is there more than once", param="name")
        if not isinstance(name, str):
            raise InvalidField("`name` is required, as a text field", param="name")
        if not isinstance(archive, UploadFile):
            raise InvalidField("`archive` is required, as a file field", param="archive")

        def save() -> wire.AdapterSaved:
            revision, replaced = upload(registry, name, archive.file)
            return wire.AdapterSaved(adapter=_saved(registry, revision), replaced=replaced)

        return await _answer(save, status=201)


async def download_adapter(request: Request) -> Response:
    """GET /v1/adapters/{name}/download"""
    name = request.path_params["name"]
    file, size = await asyncio.to_thread(lambda: _open_download(_registry(request), name))
    return StreamingResponse(
        _chunks(file),
        media_type="application/gzip",
        headers={
            "content-length": str(size),
            "content-disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}.tar.gz",
        },
    )


async def delete_adapter(request: Request) -> Response:
    """DELETE /v1/adapters/{name}"""
    registry = _registry(request)
    name = check_name(request.path_params["name"], "name")

    def delete() -> wire.AdapterDeleted:
        registry.remove(name)
        return wire.AdapterDeleted(name=name)

    return await _answer(delete)


async def merge_adapters(request: Request) -> Response:
    """POST /v1/adapters/merge: save a merge of adapters as a new one."""
    registry = _registry(request)
    body = await _body(request, wire.AdapterMerge)
    _check_merge(body)

    def merge() -> wire.AdapterMerged:
        parts = [(part.name, part.weight) for part in body.adapters]
        revision, replaced, merged = merge_into(
            registry, body.name, parts, body.method, rank=body.rank, density=body.density
        )
        return wire.AdapterMerged(
            adapter=_saved(registry, revision), replaced=replaced, relative_error=merged.relative_error
        )

    return await _answer(merge, status=201)


def _check_merge(body: wire.AdapterMerge) -> None:
    for index, part in enumerate(body.adapters):
        if not math.isfinite(part.weight):
            raise InvalidField("a weight must be finite", param=f"adapters[{index}].weight")
    if body.rank is not None and body.method == "concat":
        raise InvalidField("concat has the ranks of its parts together", param="rank")
    if body.density is not None and body.method != "ties":
        raise InvalidField("density is a parameter of ties", param="density")


def _registry(request: Request) -> AdapterRegistry:
    state: ServerState = request.app.state.kiln
    return state.service.model.adapters


async def _body(request: Request, kind: type[T]) -> T:
    body = await read_json_body(request)
    return await asyncio.to_thread(decode, body, kind)


async def _answer(work: Callable[[], msgspec.Struct], status: int = 200) -> Response:
    """Run blocking work on a thread of its own kind: preparing requests must not wait for it."""
    return _respond(await asyncio.to_thread(work), status)


def _respond(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


def _saved(registry: AdapterRegistry, revision: Revision) -> wire.AdapterEntry:
    return _entry(registry, revision.name, Known(None, revision))


def _entry(registry: AdapterRegistry, name: str, known: Known) -> wire.AdapterEntry:
    problem = None if known.problem is None else known.problem.message
    revision = known.revision
    if revision is None:
        return wire.AdapterEntry(name=name, default=name == registry.default, problem=problem)
    config = revision.config
    return wire.AdapterEntry(
        name=name,
        default=name == registry.default,
        problem=problem,
        content_sha256=revision.content_sha256,
        rank=config.rank,
        alpha=config.alpha,
        rslora=config.rslora,
        target_modules=None if config.targets is None else list(config.targets),
        base_model=config.base_model,
        size_bytes=revision.size,
        modified=revision.modified,
    )


def _open_download(registry: AdapterRegistry, name: str) -> tuple[BinaryIO, int]:
    file = download(registry, name)
    size = file.seek(0, 2)
    file.seek(0)
    return file, size


async def _chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    try:
        while chunk := await asyncio.to_thread(file.read, _CHUNK):
            yield chunk
    finally:
        file.close()


class _Form:
    """A multipart body within bounds. Its files are closed, and gone from the disk, at the end."""

    def __init__(self, request: Request, max_bytes: int) -> None:
        self._request = request
        self._max_bytes = max_bytes + _FORM_BYTES
        self._form: FormData | None = None

    async def __aenter__(self) -> FormData:
        media_type = self._request.headers.get("content-type", "").split(";")[0].strip().lower()
        if media_type != "multipart/form-data":
            raise UnsupportedMediaType(
                "an upload must be multipart/form-data",
                hint="Send the fields `name` and `archive`, as `curl -F` does.",
            )
        limited = Request(self._request.scope, _limited(self._request, self._max_bytes))
        try:
            # A large archive waits in a temporary file.
            with disk_errors():
                self._form = await limited.form(max_files=1, max_fields=8, max_part_size=_FORM_BYTES)
        except HTTPException as error:
            raise InvalidField(f"the multipart body is damaged: {error.detail}") from None
        return self._form

    async def __aexit__(self, *_: object) -> None:
        if self._form is not None:
            await self._form.close()


def _limited(request: Request, max_bytes: int) -> Receive:
    """`receive` that raises BodyTooLarge once the body is longer than `max_bytes`."""
    size = 0

    async def receive() -> Message:
        nonlocal size
        message = await request.receive()
        if not message.get("more_body", False):
            request.scope[BODY_READ] = True
        size += len(message.get("body", b""))
        if size > max_bytes:
            raise BodyTooLarge(
                f"the upload has more than {max_bytes} bytes", hint="Raise model.adapter_max_bytes."
            )
        return message

    return receive
