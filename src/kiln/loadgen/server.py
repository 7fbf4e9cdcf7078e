"""A server that workloads know how to ask, and the small steps they share."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kiln.core.errors import ConfigError
from kiln.loadgen.client.connection import Client
from kiln.loadgen.client.target import ROUTES, Target, explain, parse_target
from kiln.loadgen.client.trace import Failure, Trace
from kiln.loadgen.load import run
from kiln.loadgen.prompts import BodyOptions, PromptShape, TextSource, encode_body, generate_prompts
from kiln.loadgen.setup import find_model, tokens_per_word

T = TypeVar("T")
CHAT = ROUTES["chat"]


@dataclass(frozen=True, slots=True)
class Server:
    """A target whose model and tokens a word are known. Made once by `connect`, used many times."""

    target: Target
    tokens_per_word: float = 1.0

    def options(self, *, temperature: float | None = 0.0, **extra: Any) -> BodyOptions:
        return BodyOptions(
            model=self.target.model, temperature=temperature, ignore_eos=True, extra=dict(extra)
        )

    def text(self, tokens: int, seed: str) -> str:
        return TextSource(seed, self.tokens_per_word).text(tokens)


def connect(url: str, *, model: str | None = None, api_key: str | None = None) -> Server:
    """Look a server up: the first model it lists, and how its tokenizer takes generated words."""

    async def look_up(client: Client) -> Server:
        found = model or await find_model(client)
        words = await tokens_per_word(client, BodyOptions(model=found), 0)
        return Server(replace(client.target, model=found), words)

    return with_client(parse_target(url, model=model, api_key=api_key), look_up)


def bodies_of(server: Server, shape: PromptShape, count: int, seed: int) -> list[bytes]:
    """Request bodies for a load that is not one of the standing ones, to be given to `run_load`."""
    prompts = generate_prompts(replace(shape, tokens_per_word=server.tokens_per_word), f"{seed}")
    return [encode_body(next(prompts), server.options()) for _ in range(count)]


def known(server: Server | str) -> Server:
    return connect(server) if isinstance(server, str) else server


def with_client(target: Target, work: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
    async def working() -> T:
        client = Client(target)
        try:
            return await work(client)
        finally:
            client.close()

    return run(working())


async def answer_to(client: Client, body: bytes) -> dict[str, Any]:
    """The JSON of a request that is not streamed. Raises ConfigError."""
    answer = await client.fetch("POST", CHAT, body)
    if not isinstance(answer, Failure) and answer[0] == 200:
        parsed: dict[str, Any] = json.loads(answer[1])
        return parsed
    failure = (
        answer
        if isinstance(answer, Failure)
        else Failure(f"http_{answer[0]}", answer[1][:300].decode("utf-8", "replace"))
    )
    raise explain(failure, client.target, CHAT)


def need_all(traces: Sequence[Trace], server: Server) -> None:
    for trace in traces:
        if trace.failure is not None:
            raise explain(trace.failure, server.target, CHAT)


def in_ms(seconds: float | None) -> float:
    if seconds is None:
        raise ConfigError("an answer came without any text; its time to the first token is unknown")
    return seconds * 1000
