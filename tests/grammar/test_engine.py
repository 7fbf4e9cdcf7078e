"""Constrained sequences in the engine, over a scripted model: what may come, when it ends, who waits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from engine.scripted import FAILSAFE_S, Script, ScriptedRunner
from engine.test_loop import hear, hear_all
from kiln.core.budgets import Trigger
from kiln.core.errors import GrammarFailed
from kiln.core.sampling import SamplingParams
from kiln.core.tokens import FinishReason, Source
from kiln.engine.loop import BatchingEngine
from kiln.engine.ports import GenerationRequest, ThinkingSpec
from kiln.engine.sampling.grammar import GrammarCompiler, GrammarState
from kiln.thinking.gate import CloseSequence, GateLimits

from .letters import CALL, CLOSE, CLOSE_AND_BRACE, EOS, LAST_OF_CLOSE, N_VOCAB, NEWLINES, Letters, spell

OBJECT = (
    'start: %json {"type":"object","properties":{"a":{"type":"string"}},'
    '"required":["a"],"additionalProperties":false}'
)
NUMBER = 'start: %json {"type":"integer"}'
AFTER_NEWLINES = 'start: /\\n{0,3}/ "ok"'
LETTERS = Letters()
THINK = CloseSequence.of([CLOSE], b"</think>")
SPELLED = CloseSequence.of([*spell("</think"), LAST_OF_CLOSE], b"</think>")


def script(name: int, *says: Sequence[int] | str) -> Script:
    words = [token for part in says for token in (spell(part) if isinstance(part, str) else part)]
    return Script((name, name, name), (*words, *[EOS] * 64))


def ask(
    s: Script,
    grammar: str | None,
    max_tokens: int = 40,
    *,
    think: CloseSequence | None = None,
    limits: GateLimits | None = None,
    **rest: Any,
) -> GenerationRequest:
    rest.setdefault("eos_ids", LETTERS.eos_ids)
    return GenerationRequest(
        prompt_ids=s.prompt,
        max_tokens=max_tokens,
        sampling=rest.pop("sampling", SamplingParams(temperature=0.0)),
        seed=0,
        thinking=None if think is None else ThinkingSpec(think, limits or GateLimits()),
        grammar=grammar,
        **rest,
    )


@contextlib.asynccontextmanager
async def serving(*scripts: Script, **options: Any) -> AsyncIterator[BatchingEngine]:
    runner = ScriptedRunner(scripts, n_vocab=N_VOCAB, **options.pop("runner", {}))
    options.setdefault("grammars", GrammarCompiler(LETTERS))
    engine = BatchingEngine(
        lambda: runner, pieces=LETTERS.pieces, context_length=1024, parallel=runner.sequences, **options
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


# What may come, and when it ends.


async def test_what_the_grammar_refuses_is_not_drawn_and_a_complete_answer_ends() -> None:
    s = script(3, '{"a": "b"} and then much more')
    async with serving(s) as engine:
        heard = await hear(engine.submit(ask(s, OBJECT)))
        plain = await hear(engine.submit(ask(s, None)))
    assert LETTERS.read(heard.ids) == '{"a": "b"}'
    assert heard.reason is FinishReason.STOP
    assert LETTERS.read(plain.ids).startswith('{"a": "b"} and then')


async def test_a_complete_answer_ends_also_where_the_end_token_is_ignored() -> None:
    s = script(3, '{"a": "b"}')
    async with serving(s) as engine:
        heard = await hear(engine.submit(ask(s, OBJECT, eos_ids=frozenset())))
    assert LETTERS.read(heard.ids) == '{"a": "b"}'
    assert heard.reason is FinishReason.STOP


async def test_the_end_comes_only_where_the_grammar_accepts_it() -> None:
    early, number = script(3, [EOS], '"a": '), script(4, "12", [EOS], "345")
    async with serving(early, number) as engine:
        heard, counted = await hear_all(
            engine.submit(ask(early, OBJECT, 4)), engine.submit(ask(number, NUMBER))
        )
    assert LETTERS.read(heard.ids).startswith("{") and EOS not in heard.ids
    assert heard.reason is FinishReason.LENGTH
    assert counted.ids == [*spell("12"), EOS]
    assert counted.reason is FinishReason.STOP


async def test_the_last_token_that_fits_may_complete_the_answer() -> None:
    s = script(3, '{"a": "b"}')
    async with serving(s) as engine:
        heard = await hear(engine.submit(ask(s, OBJECT, 10)))
        cut = await hear(engine.submit(ask(s, OBJECT, 9)))
    assert heard.reason is FinishReason.STOP
    assert cut.reason is FinishReason.LENGTH


async def test_a_vocabulary_without_an_end_token() -> None:
    s, digits = script(3, '{"a": "b"}'), script(4, "123456")
    letters = Letters(eos_ids=())
    async with serving(s, digits, grammars=GrammarCompiler(letters)) as engine:
        heard = await hear(engine.submit(ask(s, OBJECT, eos_ids=frozenset())))
        number = await hear(engine.submit(ask(digits, NUMBER, 5, eos_ids=frozenset())))
    assert LETTERS.read(heard.ids) == '{"a": "b"}'
    # Nothing can end a number but the limit.
    assert number.reason is FinishReason.LENGTH and LETTERS.read(number.ids) == "12345"


async def test_added_tokens_are_no_text_but_may_be_named() -> None:
    s = script(3, '{"a": "', [CALL], "<call></think>", [CLOSE], '"}')
    named = script(4, [CALL], "x", [CALL])
    async with serving(s, named) as engine:
        heard, called = await hear_all(
            engine.submit(ask(s, OBJECT)),
            engine.submit(ask(named, f'start: <[{CALL}]> "x" <call>')),
        )
    assert not {CALL, CLOSE} & set(heard.ids)
    # Spelled with letters it is a text like any other.
    assert "<call></think>" in LETTERS.read(heard.ids)
    assert called.ids == [CALL, *spell("x"), CALL]


# After the thinking.


async def test_the_grammar_begins_when_the_thinking_has_closed() -> None:
    s = script(3, 'I think {"b', [CLOSE, NEWLINES], "ox")
    async with serving(s) as engine:
        heard = await hear(engine.submit(ask(s, AFTER_NEWLINES, think=THINK)))
    assert LETTERS.read(heard.ids) == 'I think {"b</think>\n\nok'
    assert heard.outcome.closed and heard.outcome.trigger is None


async def test_thinking_does_not_end_without_an_answer() -> None:
    s = script(3, "hm", [EOS], "m", [CLOSE], "ok")
    async with serving(s) as engine:
        heard = await hear(engine.submit(ask(s, AFTER_NEWLINES, think=THINK)))
    assert EOS not in heard.ids
    assert LETTERS.read(heard.ids).endswith("m</think>ok")


async def test_a_forced_close_is_followed_by_the_grammar() -> None:
    s = script(3, "much-ox goes on")
    async with serving(s) as engine:
        few, reserved = await hear_all(
            engine.submit(ask(s, AFTER_NEWLINES, think=THINK, limits=GateLimits(max_tokens=4))),
            engine.submit(ask(s, AFTER_NEWLINES, 9, think=THINK, limits=GateLimits(completion_tokens=9))),
        )
    assert LETTERS.read(few.ids) == "much</think>ok"
    assert few.outcome.trigger is Trigger.TOKENS
    assert [t.source for t in few.tokens[4:6]] == [Source.FORCED, Source.SAMPLED]
    assert reserved.ids[-1] == CLOSE and reserved.outcome.trigger is Trigger.MAX_TOKENS
    assert reserved.reason is FinishReason.LENGTH


async def test_a_token_that_closes_and_goes_on_must_suit_the_grammar() -> None:
    s = script(3, "a</think", [CLOSE_AND_BRACE], "1]")
    brace = 'start: "[" /[0-9]/ "]"'
    async with serving(s) as engine:
        suits, does_not = await hear_all(
            engine.submit(ask(s, brace, think=SPELLED)), engine.submit(ask(s, AFTER_NEWLINES, think=SPELLED))
        )
    assert LETTERS.read(suits.ids) == "a</think>[1]"
    assert CLOSE_AND_BRACE not in does_not.ids and not LETTERS.read(does_not.ids).startswith("a</think>[")


# Compiling.


async def test_a_grammar_that_cannot_be_compiled_fails_its_request_only() -> None:
    bad, good = script(3, "x"), script(4, "12")
    async with serving(bad, good) as engine:
        failed, heard = await hear_all(
            engine.submit(ask(bad, "start: nothing_of_this_name")), engine.submit(ask(good, NUMBER))
        )
        again = await hear(engine.submit(ask(bad, "start: nothing_of_this_name")))
    for ended in (failed, again):
        assert ended.end is not None and isinstance(ended.end.error, GrammarFailed)
        assert "nothing_of_this_name" in ended.end.error.message and "\n" not in ended.end.error.message
        assert ended.end.error.status == 400 and not ended.tokens
    assert LETTERS.read(heard.ids) == "12<end>"


async def test_an_engine_without_grammars_says_so() -> None:
    s = script(3, "12")
    async with serving(s, grammars=None) as engine:
        heard = await hear(engine.submit(ask(s, NUMBER)))
        plain = await hear(engine.submit(ask(s, None)))
    assert heard.end is not None and isinstance(heard.end.error, GrammarFailed)
    assert LETTERS.read(plain.ids) == "12<end>"


class SlowCompiler(GrammarCompiler):
    """Compiles when the test says so."""

    def __init__(self) -> None:
        super().__init__(LETTERS)
        self.asked, self.go = threading.Event(), threading.Event()

    def state(self, grammar: str) -> GrammarState:
        self.asked.set()
        assert self.go.wait(FAILSAFE_S)
        return super().state(grammar)


async def test_nobody_waits_for_the_compiling_of_another() -> None:
    slow, other = script(3, "12"), script(4, "hello")
    compiler = SlowCompiler()
    async with serving(slow, other, grammars=compiler) as engine:
        waiting, left = engine.submit(ask(slow, NUMBER)), engine.submit(ask(slow, NUMBER))
        plain = await hear(engine.submit(ask(other, None)))
        assert LETTERS.read(plain.ids) == "hello<end>"
        assert compiler.asked.is_set() and engine.stats().waiting == 2
        left.cancel()
        compiler.go.set()
        heard, cancelled = await hear_all(waiting, left)
    assert LETTERS.read(heard.ids) == "12<end>"
    assert cancelled.reason is FinishReason.CANCELLED and not cancelled.tokens


def test_compiled_grammars_are_kept_least_recently_used_out() -> None:
    compiler = GrammarCompiler(LETTERS, kept=2)
    for grammar in (NUMBER, OBJECT, NUMBER, AFTER_NEWLINES):
        compiler.state(grammar)
    assert compiler.kept_state(NUMBER) is not None
    assert compiler.kept_state(AFTER_NEWLINES) is not None
    assert compiler.kept_state(OBJECT) is None


def test_states_of_one_grammar_are_independent() -> None:
    compiler = GrammarCompiler(LETTERS)
    first, second = compiler.state(NUMBER), compiler.state(NUMBER)
    first.accept(spell("7")[0])
    assert first.allowed().mask[EOS] and not second.allowed().mask[EOS]


def test_a_token_that_is_not_allowed_is_an_error_and_not_a_silent_one() -> None:
    state = GrammarCompiler(LETTERS).state(NUMBER)
    with pytest.raises(GrammarFailed):
        state.accept(spell("x")[0])


async def test_a_preempted_sequence_goes_on_in_its_grammar() -> None:
    """Two long sequences do not fit together: the younger is computed again from its tokens."""
    texts = [f'{{"a": "{letter * 60}"}}' for letter in "xy"]
    scripts = [script(3 + i, text) for i, text in enumerate(texts)]
    async with serving(*scripts, runner={"kv_cells": 100, "sequences": 2}) as engine:
        heard = await hear_all(*(engine.submit(ask(s, OBJECT, 90)) for s in scripts))
        assert engine.stats().preemptions > 0
    assert [LETTERS.read(h.ids) for h in heard] == texts
