"""Servers on loopback that answer by a script: one that speaks the API, one that sends given bytes."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kiln.loadgen.client.trace import ANSWER, REASONING, Trace

MODEL = "scripted-1"


def event(delta: dict[str, Any] | None = None, **rest: Any) -> bytes:
    """One server-sent event of a chat stream."""
    finish = rest.pop("finish_reason", None)
    index = rest.pop("index", 0)
    choices = [] if delta is None else [{"index": index, "delta": delta, "finish_reason": finish}]
    return f"data: {json.dumps({'id': 'c-1', 'choices': choices, **rest}, ensure_ascii=False)}\n\n".encode()


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def chunked(*bodies: bytes) -> bytes:
    """Bodies in HTTP chunks, without the last chunk."""
    return b"".join(b"%x\r\n%s\r\n" % (len(body), body) for body in bodies)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def trace_of(
    times_s: Sequence[float],
    *,
    started_s: float = 0.0,
    ended_s: float | None = None,
    reasoning: int = 0,
    **fields: Any,
) -> Trace:
    """A finished trace whose first `reasoning` chunks are reasoning."""
    end = (times_s[-1] if times_s else started_s) if ended_s is None else ended_s
    return Trace(
        started_s=started_s,
        ended_s=end,
        times_s=list(times_s),
        channels=bytearray([REASONING] * reasoning + [ANSWER] * (len(times_s) - reasoning)),
        choices=[0] * len(times_s),
        **fields,
    )


class Scripted:
    """Two reasoning tokens and an answer of the other `max_tokens`, `pause_s` apart.

    A word counts as two tokens and the template as five. Bodies are kept. `fail_every` answers
    each so-manieth request with 503.
    """

    def __init__(self, pause_s: float = 0.001, fail_every: int = 0) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.pause_s = pause_s
        self.fail_every = fail_every
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self.complete, methods=["POST"]),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/models", self.models),
            ]
        )

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL}]})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self.fail_every and len(self.bodies) % self.fail_every == 0:
            return JSONResponse({"error": {"message": "too busy"}}, status_code=503)
        if body.get("model") != MODEL:
            return JSONResponse({"error": {"message": "no such model"}}, status_code=404)
        prompt = self.words(body) * 2 + 5
        if not body.get("stream"):
            await asyncio.sleep(self.pause_s)
            message = {"role": "assistant", "content": "fine"}
            choices = [{"index": i, "message": message} for i in range(body.get("n", 1))]
            return JSONResponse({"choices": choices, "usage": usage(prompt, len(choices))})
        chat = request.url.path.endswith("/chat/completions")
        return StreamingResponse(self.events(body, prompt, chat), media_type="text/event-stream")

    @staticmethod
    def words(body: dict[str, Any]) -> int:
        texts = [body["prompt"]] if "prompt" in body else [m["content"] for m in body["messages"]]
        return sum(len(text.split()) for text in texts)

    async def events(self, body: dict[str, Any], prompt: int, chat: bool) -> AsyncIterator[bytes]:
        count = body["max_tokens"]
        if chat:
            yield event({"role": "assistant"})
        for n in range(count):
            await asyncio.sleep(self.pause_s)
            if not chat:
                yield f"data: {json.dumps({'choices': [{'index': 0, 'text': f' w{n}'}]})}\n\n".encode()
            else:
                yield event({"reasoning_content" if n < 2 and count > 2 else "content": f" w{n}"})
        budget = body.get("thinking_budget_tokens")
        metadata = {} if budget is None else {"metadata": {"thinking_budget": self.record(budget)}}
        yield event({}, finish_reason="length", **metadata)
        yield event(None, usage=usage(prompt, count))
        yield DONE

    @staticmethod
    def record(budget: int) -> dict[str, Any]:
        outcome = {"triggered": True, "trigger": "tokens"} if budget < 3 else {"triggered": False}
        return {"applied": True, "max_tokens": budget, "thinking_tokens": 2, **outcome}


@contextmanager
def raw_server(*scripts: Sequence[bytes | float | None]) -> Iterator[str]:
    """A server whose nth connection sends the nth script (the last one again for later ones).

    A script is bytes to send, seconds to wait, and None to wait for the next request on the
    connection; at its end the connection is closed. It begins when a request has come.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        over = threading.Event()
        threads: list[threading.Thread] = []

        def accept() -> None:
            count = 0
            while not over.is_set():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                script = scripts[min(count, len(scripts) - 1)]
                count += 1
                threads.append(threading.Thread(target=_play, args=(connection, script, over)))
                threads[-1].start()

        acceptor = threading.Thread(target=accept)
        acceptor.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            acceptor.join()
            for thread in threads:
                thread.join()


def _play(connection: socket.socket, script: Sequence[bytes | float | None], over: threading.Event) -> None:
    with connection:
        connection.settimeout(5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            _read_request(connection)
            for step in script:
                if step is None:
                    _read_request(connection)
                elif isinstance(step, bytes):
                    connection.sendall(step)
                else:
                    over.wait(step)
            connection.shutdown(socket.SHUT_WR)
            time.sleep(0.01)
        except OSError:
            pass  # the client has gone, as some tests want it to


def _read_request(connection: socket.socket) -> None:
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            raise ConnectionError("the client closed")
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length")), 0
    )
    while len(body) < length:
        body += connection.recv(65536)
