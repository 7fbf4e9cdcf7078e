"""Structured answers of the bundled model: behind the thinking, under budgets, through every cut."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kiln.core.budgets import Trigger
from kiln.core.completion import TextDelta, TokenScored
from kiln.core.errors import InvalidField
from kiln.core.sampling import SamplingOverrides
from kiln.core.tokens import FinishReason
from kiln.core.turn import AnswerFormat

from .conftest import Chat

ANSWER = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}, "sure": {"type": "boolean"}},
    "required": ["sum", "sure"],
}
NO_THINKING = {"template_kwargs": {"enable_thinking": False}}
HOT = SamplingOverrides(temperature=1.0, top_k=0, top_p=1.0)


def shaped(schema: Any, *, strict: bool = True) -> AnswerFormat:
    return AnswerFormat("json_schema", schema, strict, "response_format.json_schema.schema")


async def test_the_model_thinks_and_then_keeps_to_the_schema(chat: Chat) -> None:
    free = await chat.ask()
    choice = await chat.ask(answer_format=shaped(ANSWER))
    answer = json.loads(choice.content)
    assert set(answer) == {"sum", "sure"} and answer["sum"] == 16
    # The grammar took nothing from the thinking.
    assert choice.reasoning == free.reasoning != ""
    assert choice.finish_reason is FinishReason.STOP
    assert choice.content == choice.content.strip()


async def test_any_object(chat: Chat) -> None:
    bias = (("}", 3.0), ('"', 1.0))
    choice = await chat.ask(answer_format=AnswerFormat("json_object"), logit_bias=bias, max_tokens=400)
    assert choice.finish_reason is FinishReason.STOP
    assert isinstance(json.loads(choice.content), dict)
    assert choice.reasoning


async def test_without_thinking_the_answer_begins_at_once(chat: Chat) -> None:
    choice = await chat.ask(answer_format=shaped(ANSWER), **NO_THINKING)
    assert not choice.reasoning and choice.content.startswith("{")
    assert set(json.loads(choice.content)) == {"sum", "sure"}


@pytest.mark.parametrize("budget", [0, 1, 7])
async def test_a_forced_close_and_then_the_schema(chat: Chat, multi_close_chat: Chat, budget: int) -> None:
    for one in (chat, multi_close_chat):
        choice = await one.ask(answer_format=shaped(ANSWER), budget_tokens=budget)
        assert choice.outcome is not None and choice.outcome.trigger is Trigger.TOKENS
        assert choice.outcome.thinking_tokens == budget
        assert set(json.loads(choice.content)) == {"sum", "sure"}


async def test_the_reservation_of_the_close_holds(chat: Chat) -> None:
    choice = await chat.ask(answer_format=shaped(ANSWER), budget_tokens=500, max_tokens=12)
    assert choice.outcome is not None and choice.outcome.trigger is Trigger.MAX_TOKENS
    assert choice.outcome.closed and choice.finish_reason is FinishReason.LENGTH


async def test_a_close_of_several_tokens_is_followed_by_the_schema(multi_close_chat: Chat) -> None:
    choices = await asyncio.gather(
        *(multi_close_chat.ask(answer_format=shaped(ANSWER), sampling=HOT, seed=seed) for seed in range(8))
    )
    assert all(set(json.loads(c.content)) == {"sum", "sure"} for c in choices)
    assert all(c.reasoning for c in choices)


@pytest.mark.parametrize(
    "text", ["a</think>b", "<think>c", "</think>", "<tool_call>{}</tool_call>", "<|im_end|>", "\n\n"]
)
async def test_markers_in_a_string_are_data(chat: Chat, multi_close_chat: Chat, text: str) -> None:
    """The first string is the only one allowed, so the model writes it whatever it thinks."""
    for one in (chat, multi_close_chat):
        choice = await one.ask(answer_format=shaped({"const": {"text": text}}))
        assert json.loads(choice.content) == {"text": text}
        assert "<think>" not in choice.reasoning and choice.tool_calls == ()


async def test_a_thought_that_the_model_opens_by_itself_is_free_too(self_opening_chat: Chat) -> None:
    wish: dict[str, Any] = {"answer_format": shaped(ANSWER), "max_tokens": 300}
    for bias, thinks in ((40.0, True), (-100.0, False)):
        choice = await self_opening_chat.ask(**wish, logit_bias=(("<think>", bias), ("</think>", 3.0)))
        assert bool(choice.reasoning) is thinks
        assert set(json.loads(choice.content)) == {"sum", "sure"}
    off = await self_opening_chat.ask(**wish, **NO_THINKING, logit_bias=(("<think>", 40.0),))
    assert not off.reasoning and set(json.loads(off.content)) == {"sum", "sure"}


async def test_every_choice_and_every_stream_keeps_to_it(chat: Chat) -> None:
    prepared = chat.prepare(answer_format=shaped(ANSWER), n=4, sampling=HOT, seed=5, top_logprobs=2)
    completion = await chat.start(prepared)
    contents = [choice.content for choice in completion.choices]
    assert len({json.loads(content)["sum"] for content in contents} | set(contents)) > 1
    streamed: dict[int, str] = {}
    scored = 0
    async for batch in chat.service.start(prepared, entered=0.0).events():
        for event in batch:
            if isinstance(event, TextDelta) and event.channel == "content":
                streamed[event.index] = streamed.get(event.index, "") + event.text
            scored += isinstance(event, TokenScored)
    assert [streamed[i] for i in range(4)] == contents
    assert scored == sum(choice.completion_tokens for choice in completion.choices)


async def test_log_probabilities_do_not_change_the_answer(chat: Chat) -> None:
    plain = await chat.ask(answer_format=shaped(ANSWER), sampling=HOT, seed=3)
    scored = await chat.ask(answer_format=shaped(ANSWER), sampling=HOT, seed=3, top_logprobs=5)
    assert (scored.content, scored.reasoning) == (plain.content, plain.reasoning)


async def test_a_complete_answer_ends_although_the_end_token_is_ignored(chat: Chat) -> None:
    choice = await chat.ask(answer_format=shaped(ANSWER), ignore_eos=True, max_tokens=500)
    assert choice.finish_reason is FinishReason.STOP
    assert set(json.loads(choice.content)) == {"sum", "sure"}


async def test_a_stop_string_cuts_the_answer_and_not_the_thinking(chat: Chat) -> None:
    whole = await chat.ask(answer_format=shaped(ANSWER))
    cut = await chat.ask(answer_format=shaped(ANSWER), stop=("sure",))
    assert cut.reasoning == whole.reasoning
    assert cut.content == whole.content.partition("sure")[0] and cut.finish_reason is FinishReason.STOP


async def test_an_exact_request_stays_exact_in_company(chat: Chat) -> None:
    """A seeded request is exact: the same tokens alone, and among others with and without grammars."""
    fields: dict[str, Any] = {"answer_format": shaped(ANSWER), "sampling": HOT, "seed": 11}
    alone = await chat.ask(**fields)
    others = [
        chat.ask(f"{i}+1-2+9=?", sampling=HOT, answer_format=shaped(ANSWER) if i % 2 else None)
        for i in range(12)
    ]
    again, *_ = await asyncio.gather(chat.ask(**fields), *others, chat.ask(**fields))
    assert (again.content, again.reasoning) == (alone.content, alone.reasoning)


async def test_bias_by_text_and_id_reaches_the_sampler(chat: Chat) -> None:
    (seven,) = chat.model.tokenizer.encode("7")
    for key in ("7", seven):
        choice = await chat.ask(logit_bias=((key, 100.0),), max_tokens=8)
        assert choice.reasoning == "7" * 8
    banned = await chat.ask(logit_bias=(("1", -100.0),), max_tokens=60)
    assert "1" not in banned.reasoning + banned.content


async def test_what_cannot_be_enforced_is_refused_before_anything_runs(chat: Chat) -> None:
    schema = {"properties": {"tags": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(InvalidField) as refused:
        chat.prepare(answer_format=shaped(schema))
    assert refused.value.param == "response_format.json_schema.schema.properties.tags.uniqueItems"
    with pytest.raises(InvalidField) as refused:
        chat.prepare(logit_bias=((99999, 1.0),))
    assert refused.value.param == "logit_bias.99999"
    assert chat.service.engine.stats().running == 0
