"""A pydantic-ai agent on kiln: it calls a tool, streams, and answers in a type.

    python examples/pydantic_ai_agent.py [URL]

Needs a running server and `pip install "pydantic-ai-slim[openai]"`.
"""

from __future__ import annotations

import asyncio
import sys

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

URL = "http://127.0.0.1:8420"


class Answer(BaseModel):
    answer: int


async def main(url: str = URL) -> None:
    provider = OpenAIProvider(base_url=f"{url}/v1/openai", api_key="none")
    model = OpenAIChatModel("tiny-reasoner", provider=provider)
    settings = ModelSettings(temperature=0)
    agent = Agent(model, model_settings=settings)

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Add two integers."""
        print("called:", f"add({a}, {b})")
        return a + b

    print("answer:", (await agent.run("Add 3 and 4.")).output)
    async with Agent(model, model_settings=settings).run_stream("3+8-2+7=?") as streamed:
        print("stream:", "".join([piece async for piece in streamed.stream_text(delta=True)]))
    typed = Agent(model, output_type=Answer, model_settings=settings)
    print("typed: ", repr((await typed.run("3+8=?")).output))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2]))
