"""The `openai` package, unmodified, against the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from servers import traffic
from servers.scripted import Stage
from servers.server import PROMPT, Server

MODEL = "tiny-reasoner"
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": PROMPT}]
ADD: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def options(http_client: object) -> dict[str, Any]:
    """The client accepts httpx's clients, though its types only name those of httpx2."""
    return {"api_key": "none", "http_client": http_client, "max_retries": 0}


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with traffic.client("") as http_client:
        yield openai.OpenAI(base_url=f"{server.url}/v1", **options(http_client))


@pytest.fixture
def scripted_client(scripted_server: Server) -> Iterator[openai.OpenAI]:
    with traffic.client("") as http_client:
        yield openai.OpenAI(base_url=f"{scripted_server.url}/v1", **options(http_client))


@pytest.fixture
async def async_client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with traffic.async_client("") as http_client:
        yield openai.AsyncOpenAI(base_url=f"{server.url}/v1", **options(http_client))


def extra(model: Any, name: str) -> Any:
    """A field that the client's types do not know."""
    assert model.model_extra is not None
    return model.model_extra.get(name)


def metadata(completion: Any) -> Any:
    """The metadata as the server sent it; the client has a field of that name for something else."""
    return completion.metadata


def test_a_completion(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, extra_body={"thinking_budget_tokens": 16}
    )
    choice = completion.choices[0]
    assert choice.message.content
    assert choice.finish_reason == "stop"
    assert extra(choice.message, "reasoning_content").startswith("3+8=11")
    assert metadata(completion)["thinking_budget"]["applied"] is True
    usage = completion.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert completion.model == MODEL


def test_a_stream(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    content, reasoning, reasons, usage = "", "", [], None
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += extra(choice.delta, "reasoning_content") or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
        if chunk.usage is not None:
            assert chunk.choices == []
            usage = chunk.usage
    assert content == plain.choices[0].message.content
    assert reasoning == extra(plain.choices[0].message, "reasoning_content")
    assert reasons == ["stop"]
    assert usage == plain.usage


def test_a_stream_left_early(client: openai.OpenAI, server: Server) -> None:
    with client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, max_tokens=3000, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    server.wait_idle()


async def test_asynchronously(async_client: openai.AsyncOpenAI) -> None:
    completions = await asyncio.gather(
        *(
            async_client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
            for _ in range(5)
        )
    )
    assert all(c.choices[0].message.content for c in completions)
    stream = await async_client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == extra_tokens(completions[0])
    content = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert content == completions[0].choices[0].message.content


def extra_tokens(completion: Any) -> int:
    tokens: int = completion.usage.completion_tokens
    return tokens


def test_the_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, temperature=0) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"


def test_three_choices(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        n=3,
        temperature=1.5,
        seed=5,
        extra_body={"thinking_budget_tokens": 8},
    )
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    texts = [(extra(c.message, "reasoning_content"), c.message.content) for c in completion.choices]
    outcomes = [extra(c, "thinking_budget") for c in completion.choices]
    assert all(outcome["closed"] and outcome["thinking_tokens"] <= 8 for outcome in outcomes)
    assert metadata(completion)["thinking_budget"]["thinking_tokens"] == outcomes[0]["thinking_tokens"]
    assert completion.usage is not None
    assert completion.usage.completion_tokens >= sum(o["thinking_tokens"] + 1 for o in outcomes)
    assert len(texts) == 3


def test_choices_of_one_seed_differ(scripted_client: openai.OpenAI, stage: Stage) -> None:
    # The scripted model is sure of one token; a great temperature makes it forget that.
    completion = scripted_client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        n=3,
        seed=1,
        temperature=1000,
        top_p=1,
        max_tokens=20,
        extra_body={"top_k": 0, "ignore_eos": True},
    )
    assert len({choice.model_dump_json(exclude={"index"}) for choice in completion.choices}) == 3


@pytest.mark.parametrize("stop", ["is", ["never", "is"]])
def test_stop(client: openai.OpenAI, stop: Any) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
    text = whole.choices[0].message.content
    assert text is not None
    assert "is" in text
    cut = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, stop=stop)
    assert cut.choices[0].message.content == text.split("is")[0]
    assert cut.choices[0].finish_reason == "stop"


def test_a_seed_repeats(client: openai.OpenAI) -> None:
    def draw(seed: int) -> str:
        completion = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, seed=seed, temperature=50, top_p=1, max_tokens=60
        )
        return completion.choices[0].message.model_dump_json()

    drawn = {seed: draw(seed) for seed in range(6)}
    assert drawn == {seed: draw(seed) for seed in range(6)}
    assert len(set(drawn.values())) > 1
    assert draw(2**64 - 1) == draw(2**64 - 1)


def test_max_tokens(client: openai.OpenAI) -> None:
    for limit in ({"max_tokens": 5}, {"max_completion_tokens": 5}):
        completion = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, extra_body=limit
        )
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 5
        assert completion.choices[0].finish_reason == "length"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_error_classes(client: openai.OpenAI) -> None:
    def create(**fields: Any) -> None:
        client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **fields})

    with pytest.raises(openai.BadRequestError) as bad:
        create(extra_body={"thinking_budget_tokens": -1})
    assert bad.value.param == "thinking_budget_tokens"
    assert bad.value.code == "invalid_field"
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as bad:
        create(n=2, stream=True)
    assert bad.value.param == "n"
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt-9")
    assert missing.value.param == "model"
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="x")
    with pytest.raises(openai.BadRequestError):
        create(messages=[{"role": "user", "content": "7" * 20_000}])


def test_a_queue_that_is_full(narrow_server: Server) -> None:
    async def flood() -> list[Any]:
        async with traffic.async_client("") as http_client:
            client = openai.AsyncOpenAI(base_url=f"{narrow_server.url}/v1", **options(http_client))
            calls = (
                client.chat.completions.create(
                    model=MODEL, messages=MESSAGES, max_tokens=64, extra_body={"ignore_eos": True}
                )
                for _ in range(60)
            )
            return await asyncio.gather(*calls, return_exceptions=True)

    results = asyncio.run(flood())
    refused = [r for r in results if isinstance(r, openai.RateLimitError)]
    assert refused
    assert all(r.code == "queue_full" and r.response.headers["retry-after"] == "1" for r in refused)
    assert all(r.choices[0].finish_reason == "length" for r in results if not isinstance(r, Exception))
    assert not [r for r in results if isinstance(r, Exception) and not isinstance(r, openai.RateLimitError)]


def test_an_engine_that_failed(scripted_client: openai.OpenAI, stage: Stage) -> None:
    from kiln.core.errors import EngineFailed

    def fail() -> int:
        raise EngineFailed("a scripted failure")

    stage.say("Hm", [fail])
    with pytest.raises(openai.InternalServerError) as failed:
        scripted_client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert failed.value.status_code == 503
    assert failed.value.code == "engine_failed"
    # A stream that has begun ends with an error event, which the client raises.
    stream = scripted_client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="a scripted failure"):
        list(stream)
    stage.say("Hm", "</think>", "Yes")
    assert scripted_client.chat.completions.create(model=MODEL, messages=MESSAGES).choices[0].message.content


def test_tools_reach_the_template(client: openai.OpenAI) -> None:
    without = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1)
    with_tool = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1, tools=[ADD])
    assert without.usage is not None
    assert with_tool.usage is not None
    assert with_tool.usage.prompt_tokens > without.usage.prompt_tokens + 40


def test_a_tool_call_round_trip(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is 26 plus 33?"}]
    asked = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, tools=[ADD])
    choice = asked.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == ""
    assert metadata(asked)["content_empty_reason"] == "tool_call"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.id
    assert call.function.name == "add"
    assert set(json.loads(call.function.arguments)) == {"a", "b"}
    messages += [
        {
            "role": "assistant",
            "content": choice.message.content,
            "tool_calls": [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "59"},
    ]
    answered = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, tools=[ADD])
    assert answered.choices[0].message.content
    assert answered.choices[0].finish_reason == "stop"


def test_a_streamed_tool_call(scripted_client: openai.OpenAI, stage: Stage) -> None:
    body = '\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n'
    stage.say("Add.", "</think>", "\n\n", "<tool_call>", body, "</tool_call>")
    with scripted_client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=[ADD]) as stream:
        final = stream.get_final_completion()
    choice = final.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.function.name == "add"
    assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
    assert not choice.message.content
