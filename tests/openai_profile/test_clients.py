"""The ecosystem's clients, unmodified: openai, LangChain, pydantic-ai. test_examples.py has LiteLLM too."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, SecretStr

from servers import traffic
from servers.server import PROMPT, Server

from .conftest import ADD, MODEL

ASK = [{"role": "user", "content": PROMPT}]


class Answer(BaseModel):
    """What 3+8=? is answered with in JSON."""

    answer: int


@pytest.fixture(autouse=True)
def nothing_leaves_this_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No client asks anybody but the server: no telemetry, no price tables, no tokenizers."""
    asked: list[object] = []
    look_up = socket.getaddrinfo

    def local_only(host: Any, *rest: Any, **more: Any) -> Any:
        if host not in ("127.0.0.1", b"127.0.0.1"):
            asked.append(host)
            raise OSError(f"{host} is not asked here")
        return look_up(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", local_only)
    yield
    assert asked == []


@pytest.fixture
def http_client() -> Iterator[httpx.Client]:
    with traffic.client("") as client:
        yield client


@pytest.fixture
async def http_async_client() -> AsyncIterator[httpx.AsyncClient]:
    async with traffic.async_client("") as client:
        yield client


def base_url(server: Server) -> str:
    return f"{server.url}/v1/openai"


# openai


def test_openai_chat_and_stream(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": ASK, "temperature": 0}
    whole = client.chat.completions.create(**ask, reasoning_effort="medium")
    assert whole.choices[0].message.content and whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens == 21
    chunks = list(
        client.chat.completions.create(
            **ask, reasoning_effort="medium", stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == [] and chunks[-1].usage is not None


def test_openai_tools_and_their_stream(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Add 3 and 4."}],
        "temperature": 0,
        "tools": [ADD],
    }
    whole = client.chat.completions.create(**ask)
    (made,) = whole.choices[0].message.tool_calls or []
    assert json.loads(made.function.arguments) == {"a": 3, "b": 4}
    with client.chat.completions.stream(**ask, tool_choice="required") as stream:
        final = stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls or []
    assert streamed.function.name == "add" and json.loads(streamed.function.arguments) == {"a": 3, "b": 4}
    assert final.choices[0].finish_reason == "tool_calls"


def test_openai_parse(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "3+8=? Answer in JSON."}],
        temperature=0,
        response_format=Answer,
    )
    assert parsed.choices[0].message.parsed == Answer(answer=11)


def test_openai_completions_and_models(client: openai.OpenAI) -> None:
    text = client.completions.create(model=MODEL, prompt=["1+1=", "2+2="], max_tokens=4, temperature=0)
    assert [choice.index for choice in text.choices] == [0, 1]
    scored = client.completions.create(model=MODEL, prompt="1+1=", max_tokens=0, echo=True, logprobs=1)
    assert scored.choices[0].logprobs is not None and scored.choices[0].text == "1+1="
    streamed = client.completions.create(model=MODEL, prompt="1+1=", max_tokens=4, temperature=0, stream=True)
    assert "".join(c.choices[0].text for c in streamed if c.choices) == text.choices[0].text
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_openai_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=ASK, temperature=9)  # type: ignore[arg-type]
    assert refused.value.param == "temperature" and refused.value.code == "invalid_field"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-5", messages=ASK)  # type: ignore[arg-type]


# LangChain


def langchain(server: Server, http_client: httpx.Client, **more: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model=MODEL,
        base_url=base_url(server),
        api_key=SecretStr("none"),
        temperature=0,
        max_retries=0,
        http_client=http_client,
        **more,
    )


def test_langchain_answers_and_streams(profile_server: Server, http_client: httpx.Client) -> None:
    model = langchain(profile_server, http_client, stream_usage=True)
    answer = model.invoke(PROMPT)
    assert answer.content and answer.usage_metadata["output_token_details"]["reasoning"] > 0
    pieces = list(model.stream(PROMPT))
    assert "".join(piece.content for piece in pieces) == answer.content
    assert sum(p.usage_metadata["output_tokens"] for p in pieces if p.usage_metadata) > 0


def test_langchain_calls_tools(profile_server: Server, http_client: httpx.Client) -> None:
    def add(a: int, b: int) -> int:
        """Add two integers."""
        return a + b

    model = langchain(profile_server, http_client).bind_tools([add])
    assert [c["args"] for c in model.invoke("Add 3 and 4.").tool_calls] == [{"a": 3, "b": 4}]
    forced = langchain(profile_server, http_client).bind_tools([add], tool_choice="add")
    whole = None
    for piece in forced.stream("Add 3 and 4."):
        whole = piece if whole is None else whole + piece
    assert whole is not None
    assert [(c["name"], c["args"]) for c in whole.tool_calls] == [("add", {"a": 3, "b": 4})]


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_structures_output(profile_server: Server, http_client: httpx.Client, method: str) -> None:
    model = langchain(profile_server, http_client).with_structured_output(Answer, method=method)
    assert isinstance(model.invoke("3+8=? Answer in JSON."), Answer)


# pydantic-ai


async def test_pydantic_ai(profile_server: Server, http_async_client: httpx.AsyncClient) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.settings import ModelSettings

    openai_client = openai.AsyncOpenAI(
        base_url=base_url(profile_server),
        api_key="none",
        http_client=http_async_client,  # type: ignore[arg-type]
    )
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=openai_client))
    settings = ModelSettings(temperature=0)
    sums: list[int] = []

    agent: Agent[None, str] = Agent(model, model_settings=settings)

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Add two integers."""
        sums.append(a + b)
        return a + b

    result = await agent.run("Add 3 and 4.")
    assert sums == [7] and "7" in result.output
    async with agent.run_stream("3+8=?") as streamed:
        text = "".join([piece async for piece in streamed.stream_text(delta=True)])
    assert "11" in text
    structured = Agent(model, output_type=Answer, model_settings=settings)
    assert isinstance((await structured.run("3+8=?")).output, Answer)
