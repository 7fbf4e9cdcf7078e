"""Learning from an exchange: after it, off its path, by the model that answered it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from kiln.chat.remembering.extraction import MAX_FACTS, SCHEMA, extraction_turn, parse
from kiln.chat.remembering.memory import MAX_WAITING, Memory, Transcript, as_context
from kiln.core.errors import InvalidField, MemoryOff, MemoryStoreNotFound, QueueFull
from kiln.core.settings import MemoryStoreSettings
from kiln.http.state import ServerState
from kiln.store.database import Database
from kiln.store.facts import Fact, NewFact
from kiln.store.memory import MemoryTables
from servers.scripted import Stage, scripted_app

TEA = Fact("fact-1", "The user likes tea", 0.0, None, 0, None, None, None)
ROME = Fact("fact-2", "The user lives in Rome", 0.0, None, 0, None, None, None)


class Said:
    """An extractor that finds what it is told to, and can be held up."""

    def __init__(self, *answers: Sequence[NewFact] | Exception) -> None:
        self.answers = list(answers)
        self.heard: list[tuple[Transcript, list[str]]] = []
        self.go = asyncio.Event()
        self.go.set()
        self.running = self.most_running = 0

    async def __call__(self, transcript: Transcript, known: Sequence[Fact]) -> list[NewFact]:
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            await self.go.wait()
            self.heard.append((transcript, [fact.text for fact in known]))
            answer = self.answers.pop(0) if self.answers else []
            if isinstance(answer, Exception):
                raise answer
            return list(answer)
        finally:
            self.running -= 1


@asynccontextmanager
async def memory(
    path: Path, extractor: Said | None = None, **stores: MemoryStoreSettings
) -> AsyncIterator[Memory]:
    opened = Memory(MemoryTables(Database(path / "kiln.db")), stores, extractor)
    try:
        yield opened
    finally:
        await opened.close()


def transcript(memory: Memory, question: str = "hi", answer: str = "hello", **key: str) -> Transcript:
    named = memory.key(key.get("owner", "ana"), key.get("memory", "home"), key.get("store"))
    return Transcript(named, "chatcmpl-1", "tiny-reasoner", question, answer)


async def recalled(memory: Memory, text: str) -> list[str]:
    return [fact.text for fact in await memory.recall("ana", "home", None, text)]


class TestMemory:
    async def test_what_was_learned_is_recalled(self, tmp_path: Path) -> None:
        said = Said([NewFact("The user likes tea", source="chatcmpl-1")])
        async with memory(tmp_path, said) as kept:
            assert await recalled(kept, "tea") == []
            kept.learn(transcript(kept, "I like tea"))
            await kept.idle()
            assert await recalled(kept, "what do I like?") == ["The user likes tea"]
        async with memory(tmp_path) as kept:
            (fact,) = await kept.recall("ana", "home", None, "tea")
            assert (fact.text, fact.source) == ("The user likes tea", "chatcmpl-1")
            assert await kept.recall("ben", "home", None, "tea") == []

    async def test_the_extraction_knows_what_is_known_and_may_contradict_it(self, tmp_path: Path) -> None:
        said = Said()
        async with memory(tmp_path, said) as kept:
            key = kept.key("ana", "home")
            (written,) = await kept.write(key, [NewFact("The user lives in Rome")])
            said.answers.append([NewFact("The user lives in Oslo now", (written.fact.id,))])
            kept.learn(transcript(kept, "I moved from Rome to Oslo"))
            await kept.idle()
            assert said.heard[0][1] == ["The user lives in Rome"]
            assert await recalled(kept, "where do I live?") == ["The user lives in Oslo now"]

    async def test_one_at_a_time_and_never_in_the_way(self, tmp_path: Path) -> None:
        said = Said()
        said.go.clear()
        async with memory(tmp_path, said) as kept:
            for _ in range(5):
                kept.learn(transcript(kept))
            assert await recalled(kept, "tea") == []  # nothing waits for the learning
            said.go.set()
            await kept.idle()
            assert (len(said.heard), said.most_running) == (5, 1)

    async def test_one_failure_costs_one_exchange(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        said = Said(QueueFull("too many"), RuntimeError("a defect"), [NewFact("The user likes tea")])
        async with memory(tmp_path, said) as kept:
            for _ in range(3):
                kept.learn(transcript(kept))
            await kept.idle()
            assert await recalled(kept, "tea") == ["The user likes tea"]
        assert "too many" in caplog.text and "a defect" in caplog.text

    async def test_what_is_too_much_is_dropped_with_a_line(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        said = Said()
        said.go.clear()
        async with memory(tmp_path, said) as kept:
            kept.learn(transcript(kept))
            await asyncio.sleep(0)
            while not said.running:
                await asyncio.sleep(0.005)
            for _ in range(MAX_WAITING + 1):
                kept.learn(transcript(kept))
            assert f"{MAX_WAITING} exchanges wait" in caplog.text
        assert f"{MAX_WAITING + 1} exchanges were not learned from: the server stops" in caplog.text
        kept.learn(transcript(kept))  # after the end: no effect

    async def test_policies(self, tmp_path: Path) -> None:
        said = Said()
        silent = MemoryStoreSettings(extraction=False)
        shallow = MemoryStoreSettings(recall_depth=1)
        async with memory(tmp_path, said, silent=silent, shallow=shallow) as kept:
            kept.learn(transcript(kept, store="silent"))
            await kept.idle()
            assert said.heard == []
            await kept.write(kept.key("ana", "home", "shallow"), [NewFact("alpha"), NewFact("beta")])
            assert len(await kept.recall("ana", "home", "shallow", "alpha beta")) == 1

    async def test_uses_are_counted(self, tmp_path: Path) -> None:
        async with memory(tmp_path) as kept:
            key = kept.key("ana", "home")
            await kept.write(key, [NewFact("alpha"), NewFact("beta")])
            await recalled(kept, "alpha")
        tables = MemoryTables(Database(tmp_path / "kiln.db"))
        assert {f.text: f.uses for f in tables.facts(key, limit=9)} == {"alpha": 1, "beta": 0}

    async def test_wrong_names(self, tmp_path: Path) -> None:
        async with memory(tmp_path) as kept:
            for text in ("", "a b", "../x", "x" * 65):
                with pytest.raises(InvalidField) as caught:
                    await kept.recall("ana", text, None, "tea")
                assert caught.value.param == "memory"
            with pytest.raises(MemoryStoreNotFound) as lost:
                await kept.recall("ana", "home", "nothing", "tea")
            assert lost.value.param == "memory_store"

    async def test_off_the_exchange_goes_on_without(self) -> None:
        kept = Memory(None, {}, Said())
        assert not kept.is_on
        assert await kept.recall("ana", "home", None, "tea") == []
        kept.learn(transcript(kept))
        await kept.idle()
        with pytest.raises(MemoryOff):
            await kept.write(kept.key("ana", "home"), [NewFact("x")])
        await kept.close()

    async def test_a_broken_store_costs_the_facts_only(self, tmp_path: Path) -> None:
        (tmp_path / "kiln.db").write_text("this is no database\n" * 100)
        async with memory(tmp_path, Said([NewFact("x")])) as kept:
            assert await recalled(kept, "tea") == []
            kept.learn(transcript(kept))
            await kept.idle()


def test_the_context_is_text() -> None:
    assert as_context([]) == ""
    assert as_context([TEA, ROME]).endswith(":\n- The user likes tea\n- The user lives in Rome")


class TestAnswers:
    def test_facts_and_what_they_replace(self) -> None:
        answer = json.dumps(
            {"facts": [{"text": "Oslo", "replaces": [2, 0, 3, -1]}, {"text": "x", "replaces": []}]}
        )
        assert parse(answer, [TEA, ROME], "id") == [
            NewFact("Oslo", ("fact-2",), "id"),
            NewFact("x", (), "id"),
        ]

    @pytest.mark.parametrize(
        "answer",
        [
            "",
            "nothing",
            "[]",
            "{}",
            '{"facts": 1}',
            '{"facts": [{"text": 1}]}',
            '{"facts": [{"text": "a"',
            "[" * 100_000,
        ]
        + ['{"facts": [{"replaces": [1]}]}', '{"facts": [{"text": "a", "replaces": ["1"]}]}', "\ud800"],
    )
    def test_anything_else_is_no_facts(self, answer: str) -> None:
        assert parse(answer, [TEA], "id") == []

    def test_too_many_are_cut(self) -> None:
        answer = json.dumps({"facts": [{"text": "x" * 9999, "replaces": []}] * 50})
        found = parse(answer, [], "id")
        assert len(found) == MAX_FACTS and len(found[0].text) == 300


@asynccontextmanager
async def scripted(path: Path, **settings: Any) -> AsyncIterator[tuple[ServerState, Stage]]:
    """A server's parts over a scripted model, in this event loop."""
    app, stage = scripted_app(store__path=str(path / "kiln.db"), **settings)
    async with app.router.lifespan_context(app):
        yield app.state.kiln, stage


class TestModelExtractor:
    def test_the_request_is_bound_to_the_form(self) -> None:
        asked = Transcript(None, "id", "m", "I moved " + "far " * 9000, "Good")  # type: ignore[arg-type]
        turn = extraction_turn(asked, [TEA, ROME], 1000)
        assert turn.answer_format is not None and turn.answer_format.schema == SCHEMA
        content = turn.conversation.messages[-1].content
        assert "1. The user likes tea\n2. The user lives in Rome" in content
        assert len(content) < 1500 and "Good" in content
        assert turn.sampling.temperature == 0.0

    async def test_the_model_is_asked_and_its_facts_are_kept(self, tmp_path: Path) -> None:
        async with scripted(tmp_path) as (state, stage):
            (written,) = await state.memory.write(
                state.memory.key("ana", "home"), [NewFact("The user lives in Rome")]
            )
            facts = [
                {"text": "The user lives in Oslo now", "replaces": [1]},
                {"text": "Ana has a cat", "replaces": []},
            ]
            stage.say(json.dumps({"facts": facts}))
            state.memory.learn(transcript(state.memory, "I moved from Rome to Oslo, with my cat"))
            await state.memory.idle()
            found = await state.memory.recall("ana", "home", None, "Where do I live?")
            assert {fact.text for fact in found} == {"The user lives in Oslo now", "Ana has a cat"}
            assert {fact.source for fact in found} == {"chatcmpl-1"}
            assert state.service.is_idle
            history = await state.memory.look(
                lambda tables: tables.facts(state.memory.key("ana", "home"), limit=9, invalid=True)
            )
            assert written.fact.id in {fact.id for fact in history if fact.invalidated_at is not None}

    @pytest.mark.parametrize("answer", ["I cannot do that.", '{"facts": [', ""])
    async def test_nonsense_is_no_facts(self, tmp_path: Path, answer: str) -> None:
        async with scripted(tmp_path) as (state, stage):
            stage.say(answer)
            state.memory.learn(transcript(state.memory))
            await state.memory.idle()
            assert await state.memory.recall("ana", "home", None, "x") == []

    async def test_what_was_made_up_is_left_out(self, tmp_path: Path) -> None:
        async with scripted(tmp_path) as (state, stage):
            facts: list[dict[str, Any]] = [
                {"text": text, "replaces": []} for text in ("The user owns a yacht", "The user likes tea")
            ]
            stage.say(json.dumps({"facts": facts}))
            state.memory.learn(transcript(state.memory, "Two teas, please"))
            await state.memory.idle()
            assert await recalled(state.memory, "yacht") == []
            stage.say(json.dumps({"facts": facts}))
            state.memory.learn(transcript(state.memory, "Tea, please"))
            await state.memory.idle()
            assert await recalled(state.memory, "yacht") == ["The user likes tea"]

    async def test_a_long_exchange_is_cut_to_the_context(self, tmp_path: Path) -> None:
        async with scripted(tmp_path, engine__ctx_size=1536) as (state, stage):
            stage.say(json.dumps({"facts": [{"text": "The user often says yes", "replaces": []}]}))
            state.memory.learn(transcript(state.memory, "word " * 3000, "yes " * 3000))
            await state.memory.idle()
            found = await state.memory.recall("ana", "home", None, "x")
            assert [fact.text for fact in found] == ["The user often says yes"]

    async def test_a_model_that_is_gone_teaches_nothing(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with scripted(tmp_path) as (state, _):
            asked = Transcript(state.memory.key("ana", "home"), "id", "another", "hi", "hello")
            with caplog.at_level(logging.INFO):
                state.memory.learn(asked)
                await state.memory.idle()
            assert "another" in caplog.text

    async def test_the_end_of_the_server_does_not_wait_for_it(self, tmp_path: Path) -> None:
        async with scripted(tmp_path, server__shutdown_grace_s=3600.0) as (state, stage):
            stage.repeat("word ")
            stage.pace_s = 0.01
            state.memory.learn(transcript(state.memory))
            while state.service.is_idle:
                await asyncio.sleep(0.005)
        assert state.service.is_idle


async def test_the_embedding_model_finds_by_meaning(tmp_path: Path) -> None:
    """The bundled model stands for one: equal texts have equal vectors, others have not."""
    model = str(files("kiln") / "models" / "tiny-reasoner-f16.gguf")
    async with scripted(tmp_path, embedding__model_path=model) as (state, _):
        key = state.memory.key("ana", "home")
        long = "3+8-2+7=? " * 3000
        written = await state.memory.write(
            key, [NewFact("日本語"), NewFact("3+8-2+7=?"), NewFact(long[:999])]
        )
        assert [w.status for w in written] == ["added"] * 3
        # No word is shared: a run of signs is one word to the full-text index.
        found = await state.memory.look(lambda tables: tables.search(key, "日本", 1))
        assert [fact.text for fact in found] == ["日本語"]
        assert len(await state.memory.recall("ana", "home", None, "")) == 3
        assert len(await state.memory.recall("ana", "home", None, long)) == 3


async def test_the_bundled_model_harms_nothing(tmp_path: Path) -> None:
    """It cannot extract facts: whatever it writes, the server goes on."""
    from kiln.cli.assembly import create_app
    from servers.server import settings_of

    app = create_app(settings_of(store__path=str(tmp_path / "kiln.db")))
    async with app.router.lifespan_context(app):
        state: ServerState = app.state.kiln
        state.memory.learn(transcript(state.memory, "My name is Ana and I like tea", "Hello Ana"))
        await state.memory.idle()
        assert state.service.is_idle
        found = await state.memory.recall("ana", "home", None, "Ana")
        assert all(fact.source == "chatcmpl-1" for fact in found)
