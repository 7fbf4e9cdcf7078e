"""300 schemas: what the bundled model writes validates, and what a schema refuses its grammar refuses.

The validator is `jsonschema`, which shares nothing with the grammar.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from kiln.chat.structured.check import GrammarCheck
from kiln.chat.structured.schemas import make_ready
from kiln.core.sampling import SamplingParams
from kiln.core.tokens import FinishReason
from kiln.engine.ports import GenerationRequest
from kiln.engine.sampling.grammar import GrammarCompiler
from kiln.text.lark import json_of
from servers.server import FIXTURES

from .conftest import Chat
from .letters import EOS, Letters, spell

SCHEMAS: list[dict[str, Any]] = json.loads((FIXTURES / "schemas.json").read_text("utf-8"))["schemas"]
MAX_TOKENS = 300
# The bundled model is small: some of its texts and numbers never end by themselves.
MUST_FINISH = 0.95


@dataclass(frozen=True)
class Written:
    name: str
    schema: Any
    text: str
    is_finished: bool

    @property
    def problem(self) -> str | None:
        """Why the text does not satisfy the schema."""
        kind = validator_for(self.schema, default=Draft202012Validator)
        try:
            value = json.loads(self.text)
        except ValueError as error:
            return f"{self.name}: {self.text!r}: {error}"
        first = next(kind(self.schema, format_checker=kind.FORMAT_CHECKER).iter_errors(value), None)
        return None if first is None else f"{self.name}: {self.text!r}: {first.message}"


async def write(chat: Chat, prompt: list[int], name: str, schema: Any, params: SamplingParams) -> Written:
    tokenizer = chat.model.tokenizer
    grammar = f"start: {json_of(make_ready(schema, name, chat.model.grammars))}"
    request = GenerationRequest(
        prompt, MAX_TOKENS, params, seed=1, eos_ids=tokenizer.eos_ids, grammar=grammar
    )
    text, reason = b"", FinishReason.ERROR
    async for delivery in chat.service.engine.submit(request):
        for token in delivery.tokens:
            text += b"" if token.token_id in tokenizer.eos_ids else tokenizer.pieces[token.token_id]
        if delivery.end is not None:
            assert delivery.end.error is None, (name, delivery.end.error)
            reason = delivery.end.reason
    return Written(name, schema, text.decode("utf-8", "replace"), reason is FinishReason.STOP)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_every_finished_answer_validates(chat: Chat, temperature: float) -> None:
    assert len(SCHEMAS) == 300
    prompt = chat.model.tokenizer.encode(
        "<|im_start|>user\nFill in.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    params = SamplingParams(temperature=temperature, top_k=0, top_p=1.0)
    answers = await asyncio.gather(
        *(write(chat, prompt, case["name"], case["schema"], params) for case in SCHEMAS)
    )
    finished = [answer for answer in answers if answer.is_finished]
    assert [answer.problem for answer in finished if answer.problem is not None] == []
    assert len(finished) >= MUST_FINISH * len(SCHEMAS)


def test_what_the_suite_calls_invalid_is_refused() -> None:
    compiler, check = GrammarCompiler(Letters(), kept=1), GrammarCheck(Letters())
    wrong, tried = [], 0
    for case in SCHEMAS:
        if not case.get("invalid"):
            continue
        grammar = f"start: {json_of(make_ready(case['schema'], case['name'], check))}"
        for value in case["invalid"]:
            tried += 1
            if admits(compiler, grammar, json.dumps(value, ensure_ascii=False)):
                wrong.append((case["name"], value))
    check.close()
    assert wrong == []
    assert tried > 200


def admits(compiler: GrammarCompiler, grammar: str, text: str) -> bool:
    state = compiler.state(grammar)
    for token in spell(text):
        if state.is_complete or not state.allowed().mask[token]:
            return False
        state.accept(token)
    return state.is_complete or bool(state.allowed().mask[EOS])
