"""Facts out of a finished exchange, found by the model that answered it, as JSON under a grammar."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from kiln.chat.models.catalog import ModelCatalog
from kiln.chat.remembering.memory import Transcript
from kiln.chat.service import ChatService
from kiln.core.access import CALLER, Identity
from kiln.core.errors import ContextExceeded
from kiln.core.messages import Conversation, Message
from kiln.core.sampling import SamplingOverrides
from kiln.core.turn import AnswerFormat, ChatTurn
from kiln.store.facts import Fact, NewFact, shares_words

log = logging.getLogger(__name__)

MAX_FACTS = 8
MAX_CHARS = 300
# Characters of the question and of the answer that the model gets to read.
_LONGEST_PART = 8000
_SHORTEST_PART = 200
MAX_TOKENS = 768
# The extraction has the lowest priority: it begins when no exchange runs, or after this time at last.
PATIENCE_S = 30.0
_POLL_S = 0.05

INSTRUCTIONS = " ".join(
    """
    You keep notes about a user for later conversations. Read the exchange and write down what it tells
    about the user that will still matter in another conversation: who they are, what they like or want,
    what they own, plan or work on, and what they ask to be remembered. Write each fact as one short
    sentence that is clear without the exchange, in the user's language. Leave out what the assistant
    said of its own accord, what only concerns this exchange, and what is noted already. Where a fact
    contradicts or updates facts that are noted already, put their numbers into "replaces". Answer with
    JSON: {"facts": [{"text": "...", "replaces": [1]}]}. Most exchanges hold nothing to note; then the
    list is empty.
    """.split()
)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "facts": {
            "type": "array",
            "maxItems": MAX_FACTS,
            "items": {
                "type": "object",
                "properties": {
                    "text": {"type": "string", "minLength": 1, "maxLength": MAX_CHARS},
                    "replaces": {"type": "array", "maxItems": MAX_FACTS, "items": {"type": "integer"}},
                },
                "required": ["text", "replaces"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["facts"],
    "additionalProperties": False,
}


class _Found(msgspec.Struct):
    text: str
    replaces: list[int] = []


class _Answer(msgspec.Struct):
    facts: list[_Found]


class ModelExtractor:
    """Asks the model of the exchange, as long as it is loaded. Implements `Extractor`."""

    def __init__(self, catalog: ModelCatalog) -> None:
        self._catalog = catalog

    async def __call__(self, transcript: Transcript, known: Sequence[Fact]) -> list[NewFact]:
        # Nobody's request: no caller may act on it.
        CALLER.set(Identity("\0extraction"))
        await self._wait_for_quiet(transcript.model)
        lease = self._catalog.ready(transcript.model)
        if lease is None:
            log.info("%s is not learned from: its model is no longer loaded", transcript.exchange_id)
            return []
        with lease as service:
            answer = await _ask(service, transcript, known)
        said = f"{transcript.question}\n{transcript.answer}"
        facts = parse(answer, known, transcript.exchange_id)
        # What has no word of the exchange in it was made up.
        return [fact for fact in facts if shares_words(fact.text, said)]

    async def _wait_for_quiet(self, model: str) -> None:
        """Wait until no exchange of the model runs. Nothing is held meanwhile: it may be unloaded."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            lease = self._catalog.ready(model)
            if lease is None:
                return
            with lease as service:
                if service.is_idle:
                    return
            await asyncio.sleep(_POLL_S)


async def _ask(service: ChatService, transcript: Transcript, known: Sequence[Fact]) -> str:
    """The model's answer. The exchange is shortened until it fits the context."""
    longest = _LONGEST_PART
    while True:
        turn = extraction_turn(transcript, known, longest)
        entered = time.monotonic()
        try:
            prepared = await service.in_worker(lambda turn=turn: service.prepare(turn))  # type: ignore[misc]
            break
        except ContextExceeded:
            longest //= 2
            if longest < _SHORTEST_PART:
                raise
    exchange = service.start(prepared, entered=entered)
    try:
        completion = await exchange.collect()
    finally:
        exchange.abandon()
    return completion.choices[0].content


def extraction_turn(transcript: Transcript, known: Sequence[Fact], longest: int = _LONGEST_PART) -> ChatTurn:
    """The request: greedy, without thinking where the template can switch it off, JSON by grammar."""
    noted = "\n".join(f"{i}. {fact.text}" for i, fact in enumerate(known, start=1)) or "nothing"
    content = (
        f"Noted already:\n{noted}\n\nThe user said:\n{_cut(transcript.question, longest)}\n\n"
        f"The assistant answered:\n{_cut(transcript.answer, longest)}"
    )
    return ChatTurn(
        Conversation(
            (Message("system", INSTRUCTIONS), Message("user", content)),
            template_kwargs={"enable_thinking": False},
        ),
        model=transcript.model,
        sampling=SamplingOverrides(temperature=0.0),
        max_tokens=MAX_TOKENS,
        budget_tokens=0,
        budget_ms=None,
        answer_format=AnswerFormat("json_schema", SCHEMA, strict=True, param="memory"),
        adapters=(),
    )


def parse(answer: str, known: Sequence[Fact], exchange_id: str) -> list[NewFact]:
    """The facts of an answer; none where it is not what was asked for, as when it was cut."""
    try:
        found = msgspec.json.decode(answer, type=_Answer).facts
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        log.info("the extraction from %s gave no facts: the answer is not of the form", exchange_id)
        return []
    return [
        NewFact(
            fact.text[:MAX_CHARS],
            tuple(known[n - 1].id for n in fact.replaces if 1 <= n <= len(known)),
            exchange_id,
        )
        for fact in found[:MAX_FACTS]
    ]


def _cut(text: str, longest: int) -> str:
    """The beginning and the end of a long text."""
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2]}\n…\n{text[-longest // 2 :]}"
