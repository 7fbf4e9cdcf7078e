"""Facts: written once, recalled by words, meaning and age, contradicted, forgotten, kept over a crash."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kiln.core.errors import EngineFailed
from kiln.core.settings import MemoryStoreSettings
from kiln.store.database import Database
from kiln.store.facts import (
    MAX_QUERY_WORDS,
    MemoryKey,
    NewFact,
    clean,
    is_memory_id,
    normalize,
    shares_words,
    similarity,
    words_of,
)
from kiln.store.memory import MemorySummary, MemoryTables

from .vectors import WordVectors

KEY = MemoryKey("ana", "home", "default")
POLICY = MemoryStoreSettings()
DAY = 86_400.0


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kiln.db"


@pytest.fixture
def tables(path: Path, clock: Clock) -> MemoryTables:
    return MemoryTables(Database(path), clock=clock)


def write(
    tables: MemoryTables, *texts: str, key: MemoryKey = KEY, policy: MemoryStoreSettings = POLICY
) -> list[str]:
    """The statuses that writing gave, one write a text."""
    return [w.status for text in texts for w in tables.write(key, policy, [NewFact(text)])]


def texts(tables: MemoryTables, key: MemoryKey = KEY, *, invalid: bool = False) -> list[str]:
    """Oldest first."""
    return [fact.text for fact in reversed(tables.facts(key, limit=1000, invalid=invalid))]


def recalled(
    tables: MemoryTables, text: str, key: MemoryKey = KEY, policy: MemoryStoreSettings = POLICY
) -> list[str]:
    return [fact.text for fact in tables.recall(key, policy, text)[0]]


class TestText:
    def test_what_counts_as_equal(self) -> None:
        assert normalize("  The User likes\tTEA. ") == normalize("the user likes tea")
        assert normalize("Ｔｅａ") == "tea"
        assert normalize("no tea") != normalize("tea")

    def test_a_fact_is_one_clean_line(self) -> None:
        assert clean(" a\n\tb\x00c\u2028d ") == "a b c d"
        assert clean("\ud800") == "?"
        assert clean("\n\x00") == ""

    def test_words(self) -> None:
        assert words_of('Tea "tea" OR NEAR(x) *') == ["tea", "near", "x"]
        assert words_of("Who is it?") == ["who", "is", "it"]
        assert len(words_of(" ".join(map(str, range(1000))))) == MAX_QUERY_WORDS

    @pytest.mark.parametrize(
        ("fact", "text", "shared"),
        [
            ("The user moves to Oslo", "I moved last week", True),
            ("The user likes tea", "Is there any TEA?", True),
            ("The user is what they are", "what is it that you are", False),
            ("The user plays chess", "3+8=?", False),
            ("ユーザーは京都に住んでいる", "私は京都に引っ越した", True),
            ("ユーザーは猫が好き", "今日は", False),
            ("", "anything", False),
        ],
    )
    def test_what_has_something_of_a_text_in_it(self, fact: str, text: str, shared: bool) -> None:
        assert shares_words(fact, text) is shared

    def test_likeness_knows_order(self) -> None:
        assert similarity("Ana likes Ben", "ana likes ben!") == 1.0
        assert similarity("Ana likes Ben", "Ben likes Ana") < 0.5

    @pytest.mark.parametrize(
        ("text", "allowed"),
        [("a", True), ("A-b_9", True), ("x" * 64, True)]
        + [(t, False) for t in ("", "x" * 65, "a b", "a/b", "..", "ä", "a\n", "a\0")],
    )
    def test_ids(self, text: str, allowed: bool) -> None:
        assert is_memory_id(text) is allowed


class TestWriting:
    def test_nothing_is_there_before_the_first_fact(self, tables: MemoryTables) -> None:
        assert recalled(tables, "anything") == texts(tables) == []
        assert not tables.memories("ana") and not tables.search(KEY, "x", 5)
        assert not list(tables.export(KEY))
        assert (tables.clear(KEY), tables.delete(KEY, "fact-1")) == (0, False)
        tables.note_used(KEY, ["fact-1"])
        assert write(tables, "", "...", "\n") == []
        assert not tables.database.exists

    def test_equal_facts_are_one(self, tables: MemoryTables, clock: Clock) -> None:
        assert write(tables, "The user likes tea.", "the user  LIKES tea") == ["added", "known"]
        (fact,) = tables.facts(KEY, limit=9)
        assert (fact.text, fact.created_at, fact.last_used_at) == (
            "The user likes tea.",
            clock.now,
            clock.now,
        )

    def test_a_new_wording_takes_the_place_of_the_old(self, tables: MemoryTables, clock: Clock) -> None:
        old = "The user works on the engine team of a company in Berlin"
        new = "The user works on the engine team of a company in Bremen"
        assert write(tables, old, new) == ["added", "replaced"]
        assert texts(tables) == [new]
        former, present = reversed(tables.facts(KEY, limit=9, invalid=True))
        assert (former.text, former.invalidated_at, former.superseded_by) == (old, clock.now, present.id)
        assert present.invalidated_at is None
        assert recalled(tables, "Berlin") == [new]
        # It may become true again.
        assert write(tables, old) == ["replaced"]
        assert texts(tables) == [old]

    def test_the_threshold_decides(self, tables: MemoryTables) -> None:
        strict, loose = replace(POLICY, dedup_threshold=1.0), replace(POLICY, dedup_threshold=0.4)
        assert write(tables, "The user has a cat", "The user has a dog", policy=strict) == ["added", "added"]
        assert write(tables, "The user has a horse", policy=loose) == ["replaced"]
        assert texts(tables) == ["The user has a horse"]

    def test_a_contradicted_fact_becomes_invalid(self, tables: MemoryTables) -> None:
        (first,) = tables.write(KEY, POLICY, [NewFact("The user lives in Rome")])
        new = NewFact("The user moved to Oslo", replaces=(first.fact.id, "fact-unknown"), source="chatcmpl-1")
        (second,) = tables.write(KEY, POLICY, [new])
        assert (second.status, second.fact.source) == ("replaced", "chatcmpl-1")
        assert texts(tables) == ["The user moved to Oslo"]
        assert tables.facts(KEY, limit=9, invalid=True)[1].superseded_by == second.fact.id

    def test_a_known_fact_contradicts_too(self, tables: MemoryTables) -> None:
        a, b = tables.write(
            KEY, POLICY, [NewFact("The user drinks tea"), NewFact("Coffee is what they like")]
        )
        again = NewFact("the user drinks tea", replaces=(a.fact.id, b.fact.id))
        assert tables.write(KEY, POLICY, [again])[0].status == "known"
        assert texts(tables) == ["The user drinks tea"]

    def test_facts_of_others_cannot_be_replaced(self, tables: MemoryTables) -> None:
        others = [replace(KEY, owner="ben"), replace(KEY, memory="work"), replace(KEY, store="notes")]
        ids = [tables.write(key, POLICY, [NewFact("A fact of mine")])[0].fact.id for key in others]
        tables.write(KEY, POLICY, [NewFact("Everything changed", replaces=tuple(ids))])
        assert [texts(tables, key) for key in others] == [["A fact of mine"]] * 3

    def test_one_write_is_one_transaction(self, path: Path, clock: Clock) -> None:
        class Broken(WordVectors):
            def __call__(self, given):  # type: ignore[no-untyped-def]
                return super().__call__(given)[:1]

        with pytest.raises(ValueError):
            MemoryTables(Database(path), Broken()).write(KEY, POLICY, [NewFact("one"), NewFact("two")])
        assert texts(MemoryTables(Database(path))) == []


class TestForgetting:
    policy = replace(POLICY, capacity=3)

    def fill(self, tables: MemoryTables, clock: Clock, policy: MemoryStoreSettings) -> None:
        """Three facts; the first was used last and most, the second never."""
        for text in ("alpha", "beta", "gamma"):
            clock.now += 10
            write(tables, text, policy=policy)
        facts = {fact.text: fact.id for fact in tables.facts(KEY, limit=9)}
        for text in ("gamma", "alpha", "alpha"):
            clock.now += 10
            tables.note_used(KEY, [facts[text]])
        clock.now += 10

    @pytest.mark.parametrize(
        ("eviction", "left"),
        [
            ("lru", ["alpha", "gamma", "delta"]),
            ("oldest", ["beta", "gamma", "delta"]),
            ("least_used", ["alpha", "gamma", "delta"]),
        ],
    )
    def test_what_goes_first(
        self, tables: MemoryTables, clock: Clock, eviction: str, left: list[str]
    ) -> None:
        policy = replace(self.policy, eviction=eviction)
        self.fill(tables, clock, policy)
        write(tables, "delta", policy=policy)
        assert texts(tables) == left
        assert tables.search(KEY, " ".join({"alpha", "beta", "gamma"} - set(left)), 9) == []

    def test_a_new_fact_is_not_the_one_to_go(self, tables: MemoryTables, clock: Clock) -> None:
        policy = replace(self.policy, eviction="least_used")
        self.fill(tables, clock, policy)
        tables.note_used(KEY, [fact.id for fact in tables.facts(KEY, limit=9)])
        write(tables, "delta", policy=policy)
        assert "delta" in texts(tables)

    def test_the_history_is_bounded_too(self, tables: MemoryTables) -> None:
        policy = replace(self.policy, dedup_threshold=0.5)
        for i in range(10):
            write(tables, f"The user is now {i} years old", policy=policy)
        assert texts(tables, invalid=True) == [f"The user is now {i} years old" for i in (6, 7, 8, 9)]

    def test_memories_have_room_of_their_own(self, tables: MemoryTables) -> None:
        other = replace(KEY, memory="work")
        write(tables, "one", "two", "three", policy=self.policy)
        write(tables, "four", "five", "six", key=other, policy=self.policy)
        assert len(texts(tables)) == len(texts(tables, other)) == 3


class TestRecall:
    def test_words_find_facts_in_any_form(self, tables: MemoryTables) -> None:
        write(tables, "The user plays chess", "The user's sister lives in Köln", "Lunch is at noon")
        assert recalled(tables, "Who is playing?")[0] == "The user plays chess"
        assert recalled(tables, "what about KOLN")[0] == "The user's sister lives in Köln"

    def test_the_newest_fill_up(self, tables: MemoryTables) -> None:
        write(tables, "alpha", "beta", "gamma", "delta")
        policy = replace(POLICY, recall_depth=3)
        assert recalled(tables, "beta", policy=policy) == ["beta", "delta", "gamma"]
        assert recalled(tables, "", policy=policy) == ["delta", "gamma", "beta"]
        assert recalled(tables, '") OR scope:(', policy=policy) == ["delta", "gamma", "beta"]

    def test_only_what_was_spoken_of_counts_as_used(self, tables: MemoryTables, clock: Clock) -> None:
        write(tables, "alpha", "beta")
        facts, matched = tables.recall(KEY, POLICY, "beta?")
        assert [fact.text for fact in facts if fact.id in matched] == ["beta"]
        clock.now += 5
        tables.note_used(KEY, matched)
        tables.note_used(replace(KEY, owner="ben"), matched)
        used = {fact.text: (fact.uses, fact.last_used_at) for fact in tables.facts(KEY, limit=9)}
        assert used == {"beta": (1, clock.now), "alpha": (0, None)}

    def test_facts_fade(self, tables: MemoryTables, clock: Clock) -> None:
        policy = replace(POLICY, half_life_days=10.0)
        write(tables, "The user likes tea a lot")
        clock.now += 30 * DAY
        write(tables, "A kettle for tea stands in the kitchen of the house next to the old stove")
        # The shorter fact is the better match, until age counts.
        assert recalled(tables, "tea")[0] == "The user likes tea a lot"
        assert recalled(tables, "tea", policy=policy)[0].startswith("A kettle")
        fact = next(f for f in tables.facts(KEY, limit=9) if f.text.startswith("The user"))
        tables.note_used(KEY, [fact.id])
        assert recalled(tables, "tea", policy=policy)[0] == "The user likes tea a lot"

    @pytest.mark.parametrize(
        "change", [{"owner": "ben"}, {"owner": ""}, {"memory": "work"}, {"store": "notes"}]
    )
    def test_nobody_elses_facts(self, tables: MemoryTables, change: dict[str, str]) -> None:
        write(tables, "The user likes tea")
        other = replace(KEY, **change)
        assert recalled(tables, "tea", other) == texts(tables, other) == []
        assert not tables.search(other, "tea", 9) and not list(tables.export(other))
        (fact,) = tables.facts(KEY, limit=1)
        assert not tables.delete(other, fact.id)
        assert tables.clear(other) == 0
        assert texts(tables) == ["The user likes tea"]

    def test_depth_bounds_it(self, tables: MemoryTables) -> None:
        write(tables, *(f"tea number {i}" for i in range(40)), policy=replace(POLICY, dedup_threshold=1.0))
        assert len(recalled(tables, "tea")) == POLICY.recall_depth
        assert len(tables.recall(KEY, POLICY, "tea", depth=20)[0]) == 20


class TestMeaning:
    @pytest.fixture
    def vectors(self) -> WordVectors:
        return WordVectors()

    @pytest.fixture
    def meaning(self, path: Path, vectors: WordVectors, clock: Clock) -> MemoryTables:
        return MemoryTables(Database(path), vectors, clock)

    def test_facts_are_found_without_a_common_word(self, meaning: MemoryTables) -> None:
        write(meaning, "Felix is a cat", "Lunch is at noon", "Tuesdays are busy")
        assert [fact.text for fact in meaning.search(KEY, "dogs or any pet", 1)] == ["Felix is a cat"]
        assert recalled(meaning, "pet")[0] == "Felix is a cat"

    def test_both_ways_together_weigh_more(self, meaning: MemoryTables) -> None:
        write(meaning, "a cat", "a pet called Felix", "Felix eats")
        assert recalled(meaning, "pet Felix")[0] == "a pet called Felix"

    def test_close_vectors_are_doubles(self, meaning: MemoryTables) -> None:
        assert write(meaning, "has cat", "has dog") == ["added", "replaced"]

    def test_another_embedder_compares_no_foreign_vectors(self, meaning: MemoryTables, path: Path) -> None:
        write(meaning, "Felix is a cat")
        other = WordVectors("other", dimensions=32)
        changed = MemoryTables(Database(path), other)
        assert changed.search(KEY, "pet", 9) == []
        assert [fact.text for fact in changed.search(KEY, "Felix", 9)] == ["Felix is a cat"]
        # The next write brings the old facts along.
        write(changed, "Lunch is at noon")
        assert [fact.text for fact in changed.search(KEY, "pet", 1)] == ["Felix is a cat"]

    def test_an_embedder_that_fails_costs_the_vectors_only(
        self, meaning: MemoryTables, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(given: Sequence[str]) -> NDArray[np.float32]:
            raise EngineFailed("out of memory")

        monkeypatch.setattr(WordVectors, "__call__", lambda self, given: fail(given))
        assert write(meaning, "Felix is a cat") == ["added"]
        assert recalled(meaning, "Felix") == ["Felix is a cat"]
        monkeypatch.undo()
        write(meaning, "Lunch is at noon")
        assert [fact.text for fact in meaning.search(KEY, "pet", 1)] == ["Felix is a cat"]

    def test_a_text_without_direction_harms_nothing(self, meaning: MemoryTables) -> None:
        write(meaning, "Felix is a cat")
        assert recalled(meaning, "") == recalled(meaning, "!?") == ["Felix is a cat"]


class TestLooking:
    def test_pages(self, tables: MemoryTables) -> None:
        write(tables, "alpha", "beta", "gamma", "delta", "epsilon")
        first = tables.facts(KEY, limit=2)
        second = tables.facts(KEY, limit=2, before=first[-1].id)
        last = tables.facts(KEY, limit=2, before=second[-1].id)
        assert [f.text for f in [*first, *second, *last]] == ["epsilon", "delta", "gamma", "beta", "alpha"]

    def test_the_export_has_everything_in_order(self, tables: MemoryTables) -> None:
        facts = [NewFact(f"fact number {i}") for i in range(700)]
        policy = replace(POLICY, capacity=5000, dedup_threshold=1.0)
        tables.write(KEY, policy, facts)
        batches = list(tables.export(KEY))
        assert len(batches) == 2
        assert [fact.text for batch in batches for fact in batch] == [fact.text for fact in facts]

    def test_summaries(self, tables: MemoryTables) -> None:
        write(tables, "alpha", "beta")
        write(tables, "gamma", key=replace(KEY, memory="work", store="notes"))
        write(tables, "delta", key=replace(KEY, owner="ben"))
        assert tables.memories("ana") == [
            MemorySummary("home", "default", 2),
            MemorySummary("work", "notes", 1),
        ]

    def test_what_is_deleted_is_gone_from_the_file(self, tables: MemoryTables, path: Path) -> None:
        write(tables, "The passphrase is xylophonequartz", "Lunch is at noon")
        secret = next(fact for fact in tables.facts(KEY, limit=9) if "xylophone" in fact.text)
        assert tables.delete(KEY, secret.id) and not tables.delete(KEY, secret.id)
        with tables.database.read() as connection:
            pass
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        assert all(b"xylophone" not in file.read_bytes() for file in path.parent.iterdir())
        assert tables.search(KEY, "xylophonequartz", 9) == []
        assert tables.clear(KEY) == 1
        assert tables.memories("ana") == []

    def test_the_full_text_index_agrees_with_the_facts(self, tables: MemoryTables) -> None:
        policy = replace(POLICY, capacity=5, dedup_threshold=0.6)
        for i in range(30):
            write(tables, f"The user is {i} years old", f"number {i} of many", policy=policy)
        tables.clear(replace(KEY, memory="other"))
        with tables.database.write() as connection:
            connection.execute("INSERT INTO facts_text (facts_text, rank) VALUES ('integrity-check', 1)")
            assert connection.execute("PRAGMA integrity_check").get == "ok"


def test_threads_write_the_same_fact_once(tables: MemoryTables) -> None:
    def write_all() -> None:
        write(tables, *(f"entry {word}" for word in "alpha beta gamma delta epsilon zeta eta theta".split()))

    threads = [threading.Thread(target=write_all) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts(tables)) == len(set(texts(tables)))


WRITER = """
import sys
from pathlib import Path
from kiln.core.settings import MemoryStoreSettings
from kiln.store.database import Database
from kiln.store.facts import MemoryKey, NewFact
from kiln.store.memory import MemoryTables

tables = MemoryTables(Database(Path(sys.argv[1])))
policy = MemoryStoreSettings(capacity=100_000, dedup_threshold=1.0)
for i in range(int(sys.argv[2]), 10**9):
    (written,) = tables.write(MemoryKey("ana", "home", "default"), policy, [NewFact(f"fact number {i}")])
    print(written.fact.text, flush=True)
"""


def test_no_acknowledged_fact_is_lost_by_kill_9(path: Path) -> None:
    """A writer is killed in the middle of its work, several times; what it had printed is there."""
    acknowledged: list[str] = []
    for count in (1, 7, 20, 3, 12):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(len(acknowledged) + 1000 * count)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        acknowledged.extend(process.stdout.readline().strip() for _ in range(count))
        os.kill(process.pid, signal.SIGKILL)
        # What was printed between the last line that was read and the kill counts too.
        acknowledged.extend(filter(None, process.stdout.read().splitlines()))
        assert process.wait(60) == -signal.SIGKILL
        process.stdout.close()
        tables = MemoryTables(Database(path))
        stored = [fact.text for batch in tables.export(KEY) for fact in batch]
        assert set(acknowledged) <= set(stored)
        assert len(stored) <= len(acknowledged) + 1 * 5
        with tables.database.write() as connection:
            connection.execute("INSERT INTO facts_text (facts_text, rank) VALUES ('integrity-check', 1)")
            assert connection.execute("PRAGMA integrity_check").get == "ok"
        tables.database.close()
