"""An embedded server and many concurrent chats, for the benchmarks that go through HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import httpx

from kiln.core.settings import Settings


def settings(*, parallel: int = 16) -> Settings:
    defaults = Settings.default()
    return replace(defaults, engine=replace(defaults.engine, parallel=parallel))


def chat_all(url: str, bodies: Iterable[dict[str, Any]], *, concurrency: int) -> list[dict[str, Any]]:
    """POST every body to /v1/chat/completions, `concurrency` at a time. Responses in order."""

    async def run() -> list[dict[str, Any]]:
        gate = asyncio.Semaphore(concurrency)
        async with httpx.AsyncClient(base_url=url, timeout=600) as client:

            async def one(body: dict[str, Any]) -> dict[str, Any]:
                async with gate:
                    response = await client.post("/v1/chat/completions", json=body)
                    response.raise_for_status()
                    answer: dict[str, Any] = response.json()
                    return answer

            return await asyncio.gather(*(one(body) for body in bodies))

    return asyncio.run(run())


def user(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}
