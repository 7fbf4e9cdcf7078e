"""A server that speaks the chat stream by a script, on a real loopback socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

REQUEST_ID = "chatcmpl-1"


def event(delta: dict[str, Any] | None = None, **rest: Any) -> bytes:
    finish = rest.pop("finish_reason", None)
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    chunk = {"id": REQUEST_ID, "object": "chat.completion.chunk", "choices": choices, **rest}
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()


class Scripted:
    """Thinks four tokens and answers; thinks until it is told to skip if the prompt says `endless`,
    answers without end if it says `talk`, and fails as the prompt's first word says otherwise."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.skipped: list[dict[str, Any]] = []
        self.skip = asyncio.Event()
        self.disconnects = 0
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self.complete, methods=["POST"]),
                Route("/lmkit/v1/chat/skip-thinking", self.skip_thinking, methods=["POST"]),
                Route("/state", self.state),
            ]
        )

    async def state(self, _: Request) -> Response:
        return JSONResponse({"bodies": self.bodies, "skipped": self.skipped, "disconnects": self.disconnects})

    async def skip_thinking(self, request: Request) -> Response:
        self.skipped.append(await request.json())
        if "deaf" not in self.bodies[-1]["messages"][-1]["content"]:
            self.skip.set()
        return Response(status_code=202)

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.skip.clear()
        asked = body["messages"][-1]["content"]
        if asked == "refuse":
            error = {"message": "no such model", "code": "model_not_found", "hint": "Look it up."}
            return JSONResponse({"error": error}, status_code=404)
        if asked == "page":
            return Response("<html>", media_type="text/html")
        return StreamingResponse(self._guarded(asked), media_type="text/event-stream")

    async def _guarded(self, asked: str) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._stream(asked):
                yield chunk
        except (asyncio.CancelledError, GeneratorExit):
            self.disconnects += 1
            raise

    async def _stream(self, asked: str) -> AsyncIterator[bytes]:
        yield b": a comment\n\n"
        yield event({"role": "assistant"})
        budget: dict[str, Any] = {"configured": True, "applied": True, "triggered": False, "closed": True}
        thoughts = 4
        if asked != "plain":
            for word in ("Let", " me", " think", "."):
                yield event({"reasoning_content": word})
        if "endless" in asked:
            while not self.skip.is_set():
                thoughts += 1
                yield event({"reasoning_content": " hm"})
                await asyncio.sleep(0.02)
        if asked == "break":
            return
        if asked == "fail":
            yield b'data: {"error": {"message": "the engine stopped", "hint": "Try again."}}\n\n'
            return
        answer = event({"content": "four\u2028\U0001f600"})
        yield answer[:60]  # an event may come in two reads
        await asyncio.sleep(0.01)
        yield answer[60:]
        while "talk" in asked:
            yield event({"content": " and"})
            await asyncio.sleep(0.02)
        if asked == "budget":
            budget |= {"triggered": True, "trigger": "tokens", "max_tokens": 4}
        budget |= {"thinking_tokens": thoughts + 12, "thinking_time_ms": 2500}
        if asked == "plain":
            budget = {"configured": True, "applied": False, "triggered": False}
        yield event({}, finish_reason="stop", metadata={"thinking_budget": budget})
        yield event(None, usage={"prompt_tokens": 3, "completion_tokens": 21, "total_tokens": 24})
        yield b"data: [DONE]\n\n"
