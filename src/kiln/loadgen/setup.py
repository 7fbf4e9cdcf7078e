"""Before the measuring: which model to ask for, how long a word is, and whether anything answers at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace

from kiln.loadgen.client.connection import Client
from kiln.loadgen.client.target import ROUTES, explain
from kiln.loadgen.client.trace import Failure
from kiln.loadgen.load import ClosedLoop, Until, generate_load
from kiln.loadgen.prompts import BodyOptions, Prompt, TextSource, encode_body

LIST_TIMEOUT_S = 10.0
# Two prompts of these many words tell the tokens a word from the tokens of the template around them.
CALIBRATION_WORDS = (32, 160)


async def find_model(client: Client) -> str | None:
    """The first model that the server lists; None where it has no list. Raises ConfigError if unreachable."""
    answer = await client.fetch("GET", "/models", timeout_s=min(client.target.timeout_s, LIST_TIMEOUT_S))
    if isinstance(answer, Failure):
        if answer.kind == "connect":
            raise explain(answer, client.target, "")
        return None
    status, body = answer
    try:
        model = json.loads(body)["data"][0]["id"] if status == 200 else None
    except (ValueError, LookupError, TypeError):
        return None
    return model if isinstance(model, str) else None


async def tokens_per_word(client: Client, options: BodyOptions, seed: int | str) -> float:
    """Tokens that the server's tokenizer makes of one word of generated text; 1.0 where it counts none."""
    source = TextSource(f"calibration:{seed}")
    counts = []
    for words in CALIBRATION_WORDS:
        body = encode_body(Prompt(None, source.text(words), 1), replace(options, extra={}))
        trace = await client.stream(ROUTES[options.endpoint], body)
        if not trace.ok or trace.prompt_tokens is None:
            return 1.0
        counts.append(trace.prompt_tokens)
    slope = (counts[1] - counts[0]) / (CALIBRATION_WORDS[1] - CALIBRATION_WORDS[0])
    return slope if slope > 0 else 1.0


async def warm_up(
    client: Client,
    bodies: Iterator[bytes],
    requests: int,
    concurrency: int,
    endpoint: str,
    stop: asyncio.Event | None = None,
) -> None:
    """Requests that are not measured. Raises ConfigError if every one of them fails."""
    load = ClosedLoop(max(1, min(requests, concurrency)))
    traces, _ = await generate_load(
        client, bodies, load, Until(requests=requests), endpoint=endpoint, stop=stop
    )
    failures = [trace.failure for trace in traces if trace.failure is not None]
    if failures and len(failures) == len(traces):
        raise explain(failures[0], client.target, ROUTES[endpoint])
