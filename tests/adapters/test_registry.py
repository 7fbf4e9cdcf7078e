"""Revisions: what a request runs with, and what happens to it when the files change."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from msgspec import UNSET

from kiln.adapters.registry import AdapterRegistry, AdaptersNotReady
from kiln.adapters.revision import Signature, content_hash, read_files
from kiln.adapters.selection import NO_ADAPTER, Selection
from kiln.adapters.storage import Storage
from kiln.core.errors import AdapterNotFound, AdapterQuotaExceeded, ConfigError, InvalidAdapter, InvalidField

from .conftest import MakeRegistry
from .samples import CHEERFUL, CONFIG, WEIGHTS, cheerful, scaled

Saved = Path


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """The adapter directory, with the bundled adapter and one of twice its delta."""
    cheerful(tmp_path / "saved" / "cheerful")
    scaled(tmp_path / "saved" / "double", 2)
    return tmp_path / "saved"


def resolve(registry: AdapterRegistry, *pairs: tuple[str, float]) -> Selection:
    """As the server does: read what must be read, then select."""
    try:
        return registry.resolve(pairs, "adapters")
    except AdaptersNotReady as waiting:
        for name in waiting.names:
            registry.load(name)
        return registry.resolve(pairs, "adapters")


def converted(registry: AdapterRegistry) -> set[Path]:
    return set(registry.storage.converted.iterdir())


def test_the_content_hash_can_be_computed_by_anybody(saved: Saved, registry: AdapterRegistry) -> None:
    files = {n: hashlib.sha256((CHEERFUL / n).read_bytes()).hexdigest() for n in (CONFIG, WEIGHTS)}
    text = json.dumps(files, sort_keys=True, separators=(",", ":"))
    expected = "sha256:" + hashlib.sha256(text.encode()).hexdigest()
    assert registry.revision("cheerful", "name").content_sha256 == expected


def test_reading_is_announced_and_done_once(saved: Saved, registry: AdapterRegistry) -> None:
    with pytest.raises(AdaptersNotReady) as waiting:
        registry.resolve([("cheerful", 1), ("double", 1), ("cheerful", 2)], "adapters")
    assert waiting.value.names == ("cheerful", "double")
    first = resolve(registry, ("cheerful", 1), ("double", 1))
    assert registry.resolve([("cheerful", 1), ("double", 1)], "adapters") == first


def test_one_adapter_at_scale_one_is_itself(saved: Saved, registry: AdapterRegistry) -> None:
    selection = resolve(registry, ("cheerful", 1.0))
    revision = registry.revision("cheerful", "name")
    assert selection.name == "cheerful"
    assert selection.identity is not None
    assert selection.identity.content_sha256 == revision.content_sha256
    assert selection.uses == ((str(revision.path), 1.0),)


def test_a_composition_is_named_and_hashed_in_request_order(saved: Saved, registry: AdapterRegistry) -> None:
    selection = resolve(registry, ("double", 1.0), ("cheerful", 0.5))
    assert selection.name == "double*1+cheerful*0.5"
    assert selection.identity is not None
    hashes = [registry.revision(name, "name").content_sha256 for name in ("double", "cheerful")]
    text = json.dumps([[hashes[0], 1.0], [hashes[1], 0.5]], separators=(",", ":"))
    assert selection.identity.content_sha256 == "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def test_the_order_does_not_change_what_is_computed(saved: Saved, registry: AdapterRegistry) -> None:
    one, other = (
        resolve(registry, ("double", 1), ("cheerful", 0.5)),
        resolve(registry, ("cheerful", 0.5), ("double", 1)),
    )
    assert (one.uses, one.scope) == (other.uses, other.scope)
    assert one.identity != other.identity


def test_the_same_adapter_twice_adds_up(saved: Saved, registry: AdapterRegistry) -> None:
    twice = resolve(registry, ("cheerful", 1), ("cheerful", 0.5))
    once = resolve(registry, ("cheerful", 1.5))
    assert (twice.uses, twice.scope) == (once.uses, once.scope)
    assert twice.name == "cheerful*1+cheerful*0.5"
    nothing = resolve(registry, ("cheerful", 1), ("cheerful", -1))
    assert (nothing.uses, nothing.scope) == ((), "")
    assert nothing.identity is not None


def test_scales_make_different_scopes(saved: Saved, registry: AdapterRegistry) -> None:
    scales = (1.0, -1.0, 0.1, 0.10000000000000002, 1e300)
    assert len({resolve(registry, ("cheerful", scale)).scope for scale in scales}) == len(scales)


def test_no_pairs_are_the_base_model(registry: AdapterRegistry) -> None:
    assert registry.resolve((), "adapters") is NO_ADAPTER
    assert registry.resolve(UNSET, "adapter") is NO_ADAPTER


def test_sums_and_names_have_limits(saved: Saved, registry: AdapterRegistry) -> None:
    with pytest.raises(InvalidField, match="no finite number"):
        resolve(registry, ("cheerful", 1.7e308), ("cheerful", 1.7e308))
    with pytest.raises(InvalidField, match="more than 256 bytes"):
        resolve(registry, *[("cheerful", 0.125)] * 20)


def test_an_unknown_name_is_found_missing(saved: Saved, registry: AdapterRegistry) -> None:
    with pytest.raises(AdapterNotFound) as refused:
        resolve(registry, ("cheerful", 1), ("dreary", 1))
    assert refused.value.param == "adapters[1].name"


def test_the_default_is_what_none_selects(saved: Saved, registry: AdapterRegistry) -> None:
    registry.load_default("double")
    assert registry.default == "double"
    assert registry.resolve(UNSET, "adapter").name == "double"
    assert registry.resolve((), "adapter") is NO_ADAPTER
    registry.load_default(None)
    assert registry.resolve(UNSET, "adapter") is NO_ADAPTER
    with pytest.raises(AdapterNotFound):
        registry.load_default("dreary")


def test_a_default_that_was_taken_away_is_said_to_be_gone(saved: Saved, registry: AdapterRegistry) -> None:
    registry.load_default("double")
    shutil.rmtree(saved / "double")
    with pytest.raises(AdaptersNotReady) as waiting:
        registry.resolve(UNSET, "adapter")
    waiting.value.load()
    with pytest.raises(AdapterNotFound, match="the server's default, is not there") as gone:
        registry.resolve(UNSET, "adapter")
    assert gone.value.param is None
    assert registry.resolve((), "adapter") is NO_ADAPTER


def test_changed_files_are_a_new_revision_and_the_old_one_lives_on(
    saved: Saved, registry: AdapterRegistry
) -> None:
    running = resolve(registry, ("cheerful", 1))
    scaled(saved / "cheerful", 3)
    begun_later = resolve(registry, ("cheerful", 1))
    assert begun_later.scope != running.scope
    assert begun_later.identity != running.identity
    assert [Path(path).exists() for path, _ in running.uses + begun_later.uses] == [True, True]


def test_a_file_goes_with_the_last_request_that_uses_it(saved: Saved, registry: AdapterRegistry) -> None:
    running = resolve(registry, ("cheerful", 1))
    old = Path(running.uses[0][0])
    scaled(saved / "cheerful", 3)
    resolve(registry, ("cheerful", 1))
    assert old.exists()
    del running
    gc.collect()
    scaled(saved / "cheerful", 4)
    resolve(registry, ("cheerful", 1))
    assert not old.exists()
    gc.collect()
    registry.load("dreary")
    assert len(converted(registry)) == 1


def test_a_file_that_comes_back_stays_for_who_had_it_first(saved: Saved, registry: AdapterRegistry) -> None:
    scaled(saved / "cheerful", 1)
    running = resolve(registry, ("cheerful", 1))
    for factor in (3, 1, 3, 1, 3):
        scaled(saved / "cheerful", factor)
        assert (resolve(registry, ("cheerful", 1)).uses == running.uses) == (factor == 1)
    gc.collect()
    registry.load("dreary")
    assert Path(running.uses[0][0]).exists()


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_said_and_not_remembered(
    saved: Saved, registry: AdapterRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("kiln.adapters.revision.convert", no_space)
        with pytest.raises(AdapterQuotaExceeded, match="disk is full"):
            registry.load("cheerful")
    assert converted(registry) == set()
    assert resolve(registry, ("cheerful", 1)).name == "cheerful"


def test_on_a_full_disk_adapters_can_be_listed_and_deleted(
    saved: Saved, registry: AdapterRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.load("cheerful")
    make = Path.mkdir

    def no_new_folder(path: Path, *args: bool, **options: bool) -> None:
        if not path.exists():
            no_space()
        make(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr("kiln.adapters.revision.convert", no_space)
        patch.setattr(Path, "mkdir", no_new_folder)
        first, second = registry.entries()
        assert first.known.problem is None and first.known.revision is not None
        assert second.known.revision is None
        assert isinstance(second.known.problem, AdapterQuotaExceeded)
        registry.remove("double")
        assert [entry.name for entry in registry.entries()] == ["cheerful"]
    assert list((saved / ".kiln" / "staging").iterdir()) == []


@pytest.mark.parametrize("damage", [False, True])
def test_what_is_downloaded_or_merged_is_one_state_of_the_files(
    damage: bool, saved: Saved, registry: AdapterRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_after_a_change(name: str, folder: Path, max_bytes: int) -> tuple[Signature, bytes, bytes]:
        monkeypatch.undo()
        if damage:
            os.truncate(folder / WEIGHTS, 5000)
        else:
            shutil.rmtree(folder)
            cheerful(folder)
        return read_files(name, folder, max_bytes)

    registry.load("double")
    monkeypatch.setattr("kiln.adapters.registry.read_files", read_after_a_change)
    if damage:
        with pytest.raises(InvalidAdapter, match="cut off"):
            registry.files("double", "name")
    else:
        revision, config, weights = registry.files("double", "name")
        assert revision.content_sha256 == content_hash(config, weights)
        assert weights == (CHEERFUL / WEIGHTS).read_bytes()


def test_the_same_content_under_another_name_keeps_the_file(saved: Saved, registry: AdapterRegistry) -> None:
    cheerful(saved / "twin")
    one, twin = resolve(registry, ("cheerful", 1)), resolve(registry, ("twin", 1))
    assert one.uses == twin.uses
    assert len(converted(registry)) == 1
    del one, twin
    scaled(saved / "cheerful", 2)
    resolve(registry, ("cheerful", 1))
    gc.collect()
    registry.load("dreary")
    assert Path(resolve(registry, ("twin", 1)).uses[0][0]).exists()


def test_half_written_files_leave_the_last_good_revision(saved: Saved, registry: AdapterRegistry) -> None:
    good = resolve(registry, ("cheerful", 1))
    weights = saved / "cheerful" / WEIGHTS
    data = weights.read_bytes()
    weights.write_bytes(data[:1000])
    assert resolve(registry, ("cheerful", 1)) == good
    (entry, _) = registry.entries()
    assert isinstance(entry.known.problem, InvalidAdapter)
    with pytest.raises(InvalidAdapter, match="'cheerful' cannot be loaded"):
        registry.revision("cheerful", "name")
    weights.unlink()
    assert resolve(registry, ("cheerful", 1)) == good
    weights.write_bytes(data)
    assert resolve(registry, ("cheerful", 1)).uses == good.uses
    assert registry.entries()[0].known.problem is None


def test_an_adapter_that_was_never_good_is_refused_once_it_is_asked_for(
    saved: Saved, registry: AdapterRegistry
) -> None:
    (saved / "double" / WEIGHTS).write_bytes(b"")
    with pytest.raises(InvalidAdapter) as refused:
        resolve(registry, ("double", 1))
    assert refused.value.param == "adapters[0].name"
    scaled(saved / "double", 2)
    assert resolve(registry, ("double", 1)).name == "double"


def test_a_removed_folder_is_forgotten(saved: Saved, registry: AdapterRegistry) -> None:
    resolve(registry, ("double", 1))
    shutil.rmtree(saved / "double")
    with pytest.raises(AdapterNotFound):
        resolve(registry, ("double", 1))
    assert [entry.name for entry in registry.entries()] == ["cheerful"]


def test_a_directory_that_is_taken_away_is_empty(saved: Saved, registry: AdapterRegistry) -> None:
    assert len(registry.entries()) == 2
    shutil.rmtree(saved)
    assert (registry.entries(), registry.used_bytes) == ([], 0)
    with pytest.raises(AdapterNotFound):
        resolve(registry, ("cheerful", 1))


def test_other_folders_are_left_alone(saved: Saved, registry: AdapterRegistry) -> None:
    (saved / "notes").mkdir()
    (saved / "notes" / "todo.txt").write_text("much")
    assert [entry.name for entry in registry.entries()] == ["cheerful", "double"]
    with pytest.raises(AdapterNotFound):
        resolve(registry, ("notes", 1))
    with pytest.raises(AdapterNotFound):
        registry.remove("notes")
    with pytest.raises(InvalidField, match="not an adapter"):
        staged_copy(registry.storage, saved / "double", "notes")
    assert (saved / "notes" / "todo.txt").exists()


def test_what_is_no_plain_file_is_not_read(saved: Saved, registry: AdapterRegistry) -> None:
    (saved / "double" / WEIGHTS).unlink()
    os.mkfifo(saved / "double" / WEIGHTS)
    with pytest.raises(InvalidAdapter, match="not a plain file"):
        registry.revision("double", "name")


def test_a_lost_converted_file_is_made_again(saved: Saved, registry: AdapterRegistry) -> None:
    path = Path(resolve(registry, ("cheerful", 1)).uses[0][0])
    first = path.read_bytes()
    path.unlink()
    resolve(registry, ("cheerful", 1))
    assert path.read_bytes() == first


def test_a_restart_finds_the_converted_file(saved: Saved, make_registry: MakeRegistry) -> None:
    path = Path(resolve(make_registry(), ("cheerful", 1)).uses[0][0])
    stamp = path.stat().st_ino
    assert Path(resolve(make_registry(), ("cheerful", 1)).uses[0][0]).stat().st_ino == stamp


def test_a_converted_file_that_nobody_used_for_long_is_deleted(
    saved: Saved, make_registry: MakeRegistry
) -> None:
    first = make_registry()
    path = Path(resolve(first, ("cheerful", 1)).uses[0][0])
    os.utime(path, (0, 0))
    make_registry()
    assert not path.exists()
    resolve(first, ("cheerful", 1))
    assert path.exists()


def staged_copy(storage: Storage, folder: Path, name: str) -> None:
    with storage.staged() as staged:
        for file in (CONFIG, WEIGHTS):
            shutil.copy(folder / file, staged / file)
        storage.install(staged, name)


def test_installing_replaces_whole_folders(saved: Saved, registry: AdapterRegistry) -> None:
    old = resolve(registry, ("cheerful", 1))
    (saved / "cheerful" / "old.txt").write_text("old")
    staged_copy(registry.storage, saved / "double", "cheerful")
    assert sorted(p.name for p in (saved / "cheerful").iterdir()) == [CONFIG, WEIGHTS]
    assert resolve(registry, ("cheerful", 1)).scope != old.scope
    assert sorted(p.name for p in (saved / ".kiln").iterdir()) == ["converted", "lock", "replaced", "staging"]
    assert list((saved / ".kiln" / "replaced").iterdir()) == []
    assert list((saved / ".kiln" / "staging").iterdir()) == []


def test_a_link_that_leads_nowhere_has_the_name(saved: Saved, registry: AdapterRegistry) -> None:
    (saved / "gone").symlink_to("nowhere")
    with registry.storage.staged() as staged:
        shutil.copytree(CHEERFUL, staged, dirs_exist_ok=True)
        with pytest.raises(InvalidField, match="not an adapter"):
            registry.save(staged, "gone", "archive")
    assert (saved / "gone").is_symlink()


def test_a_link_is_deleted_and_not_what_it_leads_to(
    tmp_path: Path, saved: Saved, registry: AdapterRegistry
) -> None:
    (saved / "linked").symlink_to(scaled(tmp_path / "elsewhere", 2))
    assert resolve(registry, ("linked", 1)).name == "linked"
    registry.remove("linked")
    assert (tmp_path / "elsewhere" / WEIGHTS).is_file()
    assert list((saved / ".kiln" / "staging").iterdir()) == []


def test_the_quota_counts_what_is_replaced(saved: Saved, make_registry: MakeRegistry) -> None:
    size = sum(path.stat().st_size for path in CHEERFUL.iterdir())
    storage = make_registry(quota=2 * size + 100).storage
    staged_copy(storage, saved / "double", "cheerful")
    with pytest.raises(AdapterQuotaExceeded):
        staged_copy(storage, saved / "double", "third")
    assert storage.names() == ["cheerful", "double"]


@pytest.mark.parametrize("crash", ["before the rename", "between the renames", "after the renames"])
def test_a_crash_leaves_whole_adapters(crash: str, saved: Saved, make_registry: MakeRegistry) -> None:
    """The states that a replacement passes through, as a crash would leave them."""
    own = saved / ".kiln"
    shutil.copytree(saved / "double", own / "staging" / "ab12")
    (own / "converted").mkdir(parents=True)
    (own / "converted" / "x.part").write_bytes(b"half")
    if crash != "before the rename":
        (own / "replaced" / "cd34").mkdir(parents=True)
        (saved / "cheerful").rename(own / "replaced" / "cd34" / "cheerful")
    if crash == "after the renames":
        (own / "staging" / "ab12").rename(saved / "cheerful")
    registry = make_registry()
    left = {path.name for path in own.rglob("*") if path.is_file()}
    assert left == {"lock"}
    assert [entry.name for entry in registry.entries()] == ["cheerful", "double"]
    same = registry.revision("cheerful", "name").path == registry.revision("double", "name").path
    assert same == (crash == "after the renames")


def test_a_second_server_does_not_clean_up_after_a_living_one(
    saved: Saved, make_registry: MakeRegistry
) -> None:
    with make_registry().storage.staged() as staged:
        (staged / "x").write_text("being written")
        make_registry()
        assert (staged / "x").exists()


def test_a_directory_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="adapter_dir"):
        Storage(tmp_path / "file")
