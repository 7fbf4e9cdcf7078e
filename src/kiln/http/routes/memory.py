"""`/lmkit/v1/memory`: what is remembered, for the person whose it is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import asdict

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kiln.chat.remembering.memory import Memory
from kiln.core.access import ANONYMOUS
from kiln.core.errors import FactNotFound, InvalidField, MemoryStoreNotFound, ScopeRefused
from kiln.core.text import shorten
from kiln.dialects.validate import decode
from kiln.http.body import read_json_body
from kiln.http.guard import caller_of
from kiln.http.state import ServerState
from kiln.store.facts import MAX_FACT_CHARS, MemoryKey, NewFact, normalize

MAX_BODY_BYTES = 65_536
MAX_QUERY_CHARS = 4000
DEFAULT_LIMIT = 100
MAX_LIMIT = 1000


class WriteFact(msgspec.Struct):
    """Body of POST /lmkit/v1/memory/{memory_id}."""

    text: str


async def list_memories(request: Request) -> Response:
    """The caller's memories, each with its store and the number of its valid facts."""
    memory, owner = _memory_of(request)
    found = await memory.look(lambda tables: tables.memories(owner))
    return _json({"memories": [asdict(summary) for summary in found]})


async def list_facts(request: Request) -> Response:
    """Facts, newest first; with `q` those that speak of it, best first."""
    memory, key = _key_of(request)
    limit, query = _limit(request), request.query_params.get("q")
    if query is not None:
        if len(query) > MAX_QUERY_CHARS:
            raise InvalidField(f"q may have {MAX_QUERY_CHARS} characters", param="q")
        found = await memory.look(lambda tables: tables.search(key, query, limit))
        return _json({"facts": found, "next": None})
    before, invalid = request.query_params.get("before"), _flag(request, "invalid")
    page = await memory.look(
        lambda tables: tables.facts(key, limit=limit + 1, before=before, invalid=invalid)
    )
    more = page[limit - 1].id if len(page) > limit else None
    return _json({"facts": page[:limit], "next": more})


async def write_fact(request: Request) -> Response:
    """201 for a fact that is on the disk now; 200 for one that was known in these words."""
    memory, key = _key_of(request)
    body = decode(await read_json_body(request, MAX_BODY_BYTES), WriteFact)
    if len(body.text) > MAX_FACT_CHARS or not normalize(body.text):
        raise InvalidField(f"text must have words, and {MAX_FACT_CHARS} characters at most", param="text")
    written = await memory.write(key, [NewFact(body.text)])
    if not written:
        raise InvalidField("text has no words", param="text")
    return _json(written[0], 200 if written[0].status == "known" else 201)


async def delete_fact(request: Request) -> Response:
    """Delete one fact for good."""
    memory, key = _key_of(request)
    fact_id: str = request.path_params["fact_id"]
    if not await memory.change(lambda tables: tables.delete(key, fact_id)):
        raise FactNotFound(f"there is no fact {shorten(fact_id)} in this memory", param="fact_id")
    return _json({"deleted": 1})


async def clear_memory(request: Request) -> Response:
    """Delete all facts of a memory for good, invalid ones too."""
    memory, key = _key_of(request)
    return _json({"deleted": await memory.change(lambda tables: tables.clear(key))})


async def export_memory(request: Request) -> Response:
    """Every fact as a line of JSON, oldest first, invalid ones too."""
    memory, key = _key_of(request)
    exporting = await memory.look(lambda tables: tables.export(key))
    # A store that cannot be read is to be refused, and shows with its first rows.
    first = await memory.in_worker(lambda: next(exporting, None))

    async def lines() -> AsyncIterator[bytes]:
        batch = first
        while batch is not None:
            yield b"".join(msgspec.json.encode(fact) + b"\n" for fact in batch)
            batch = await memory.in_worker(lambda: next(exporting, None))

    name = f'attachment; filename="memory-{key.memory}.jsonl"'
    return StreamingResponse(
        lines(), media_type="application/x-ndjson", headers={"content-disposition": name}
    )


def _memory_of(request: Request) -> tuple[Memory, str]:
    """The memory, and whose it is: the caller's, unless an admin names another `owner`."""
    state: ServerState = request.app.state.kiln
    caller = caller_of(request)
    asked = request.query_params.get("owner")
    if asked is None or asked == caller.name:
        return state.memory, caller.owner
    if not caller.is_admin:
        raise ScopeRefused("only admins may look into the memory of others", param="owner")
    return state.memory, ANONYMOUS if asked == "anonymous" else asked


def _key_of(request: Request) -> tuple[Memory, MemoryKey]:
    memory, owner = _memory_of(request)
    store = request.query_params.get("store")
    try:
        return memory, memory.key(owner, request.path_params["memory_id"], store)
    except MemoryStoreNotFound as error:
        # Here the field has another name than in a chat.
        raise MemoryStoreNotFound(f"`store`: {error.message}", param="store") from None


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", str(DEFAULT_LIMIT))
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= MAX_LIMIT):
        raise InvalidField(
            f"limit must be a whole number from 1 to {MAX_LIMIT}, not {shorten(text)}", param="limit"
        )
    return int(text)


def _flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false")
    if text not in ("true", "false"):
        raise InvalidField(f"{name} must be true or false, not {shorten(text)}", param=name)
    return text == "true"


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")
