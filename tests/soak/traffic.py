"""Mixed traffic for a long run: every way to ask, and every way to go away."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx

TIMEOUT_S = 120.0
CHAT = "/v1/chat/completions"
SUMS = ("3+8-2+7=?", "1+1=?", "9-5+2=?", "4+5=?")
# Long and repetitive, so that prefixes are shared, prompts are chunked and drafts are made.
DOCUMENT = " ".join(f"{n}+{n}={2 * n}." for n in range(60))

Body = dict[str, Any]


class Traffic:
    """Asks one server. `outcomes` counts what was asked; `strange` lists answers that should not be."""

    def __init__(self, url: str, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.strange: list[str] = []
        self._rng = random.Random(seed)
        self._client = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S)

    async def close(self) -> None:
        await self._client.aclose()

    async def run(self, *, count: int, seconds: float, clients: int) -> int:
        """Ask at least `count` times and for at least `seconds`. Returns how often."""
        loop = asyncio.get_running_loop()
        end, asked = loop.time() + seconds, 0

        async def client() -> None:
            nonlocal asked
            while asked < count or loop.time() < end:
                asked += 1
                await self._one()

        await asyncio.gather(*(client() for _ in range(clients)))
        return asked

    async def _one(self) -> None:
        rng = self._rng
        kinds = [
            (4, self._whole),
            (4, self._stream),
            (3, self._leave_stream),
            (2, self._leave_whole),
            (1, self._batch),
            (1, self._score),
            (1, self._json),
            (1, self._refused),
        ]
        (kind,) = rng.choices([k for _, k in kinds], [w for w, _ in kinds])
        try:
            await kind()
        except httpx.HTTPError as error:
            self.strange.append(f"{kind.__name__}: {error!r}")
        self.outcomes[kind.__name__.strip("_")] += 1

    def _body(self, **fields: Any) -> Body:
        rng = self._rng
        content = rng.choice(SUMS)
        if rng.random() < 0.3:
            content = DOCUMENT[: rng.randrange(50, len(DOCUMENT))] + " " + content
        body: Body = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": rng.choice([1, 8, 40, 200]),
            "temperature": rng.choice([0, 0.7, 1.5]),
            **fields,
        }
        if rng.random() < 0.5:
            body["seed"] = rng.randrange(50)
        if rng.random() < 0.5:
            body["thinking_budget_tokens"] = rng.choice([0, 3, 20])
        if rng.random() < 0.2:
            body["thinking_budget_ms"] = rng.choice([0, 5, 1000])
        if rng.random() < 0.2 and not body.get("stream"):
            body["n"] = rng.choice([2, 4])
        if rng.random() < 0.2:
            body["stop"] = ["answer"]
        if rng.random() < 0.3:
            body["adapter"] = rng.choice(["cheerful", "quiet"])
        return body

    async def _whole(self) -> None:
        self._expect(await self._client.post(CHAT, json=self._body()), 200)

    async def _stream(self) -> None:
        response = await self._client.post(CHAT, json=self._body(stream=True))
        self._expect(response, 200)
        if not response.text.endswith("data: [DONE]\n\n"):
            self.strange.append(f"a stream ended with {response.text[-200:]!r}")

    async def _leave_stream(self) -> None:
        body = self._body(stream=True, max_tokens=1000, ignore_eos=True)
        after = self._rng.randrange(1, 40)
        async with self._client.stream("POST", CHAT, json=body) as response:
            async for _ in response.aiter_lines():
                after -= 1
                if after == 0:
                    break

    async def _leave_whole(self) -> None:
        body = self._body(max_tokens=1000, ignore_eos=True)
        try:
            async with asyncio.timeout(self._rng.random() * 0.5):
                await self._client.post(CHAT, json=body)
        except TimeoutError:
            pass

    async def _batch(self) -> None:
        prompts = [[{"role": "user", "content": c}] for c in self._rng.sample(SUMS, 3)]
        body = {"prompts": prompts, "n": 2, "max_tokens": 20, "seed": self._rng.randrange(9)}
        self._expect(await self._client.post("/v1/completions/batch", json=body), 200)

    async def _score(self) -> None:
        text = DOCUMENT[: self._rng.randrange(10, len(DOCUMENT))]
        body = {"prompt": text, "prompt_logprobs": self._rng.choice([0, 3])}
        self._expect(await self._client.post("/v1/completions", json=body), 200)

    async def _json(self) -> None:
        body = {
            "model": "tiny-reasoner",
            "messages": [{"role": "user", "content": "3+8=? Answer in JSON."}],
            "response_format": {"type": "json_object"},
            "max_completion_tokens": 120,
        }
        response = await self._client.post("/v1/openai/chat/completions", json=body)
        self._expect(response, 200)
        if response.status_code == 200 and response.json()["choices"][0]["finish_reason"] == "stop":
            json.loads(response.json()["choices"][0]["message"]["content"])

    async def _refused(self) -> None:
        bad: Body = self._rng.choice(
            [
                {"messages": [{"role": "user", "content": 3}]},
                {"max_tokens": -1},
                {"temperature": "hot"},
                {"adapter": "nobody"},
            ]
        )
        response = await self._client.post(CHAT, json={**self._body(), **bad})
        if not 400 <= response.status_code < 500:
            self._expect(response, 400)

    def _expect(self, response: httpx.Response, status: int) -> None:
        if response.status_code != status:
            self.strange.append(f"{response.status_code} {response.text[:300]}")
