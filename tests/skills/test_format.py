"""The rules of the Agent Skills format: what a SKILL.md may be, and what is said of one that is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kiln.skills.files import Faulty
from kiln.skills.frontmatter import MAX_HEAD_CHARS, split
from kiln.skills.library import check
from kiln.skills.skill import MAX_FILE_BYTES, Skill, is_name, parse

from .folders import EXAMPLES, skill_text, write_skill

FOLDER = Path("/library/a-skill")


def faults(text: str, folder: Path = FOLDER) -> list[str]:
    with pytest.raises(Faulty) as caught:
        parse(text, folder)
    return [str(fault) for fault in caught.value.faults]


def test_every_field_of_the_format_is_read() -> None:
    head = (
        "license: Apache-2.0\ncompatibility: needs git\nallowed-tools: Read Bash(git:*)\n"
        "metadata:\n  version: 1.0\n  author: us"
    )
    skill = parse(skill_text("a-skill", head, "\n# Title\n\nDo it.\n"), FOLDER)
    assert skill == Skill(
        name="a-skill",
        description="Does a thing. Use when it is asked for.",
        instructions="# Title\n\nDo it.",
        folder=FOLDER,
        license="Apache-2.0",
        compatibility="needs git",
        # As it is written: the format's metadata are texts.
        metadata={"version": "1.0", "author": "us"},
        allowed_tools=("Read", "Bash(git:*)"),
    )


def test_the_least_skill_has_a_name_and_a_description() -> None:
    skill = parse("---\nname: a-skill\ndescription: x\n---", FOLDER)
    assert (skill.instructions, skill.questions, skill.allowed_tools) == ("", (), ())


def test_allowed_tools_may_be_a_list() -> None:
    skill = parse(skill_text("a-skill", "allowed-tools:\n  - Read\n  - Bash(git diff)"), FOLDER)
    assert skill.allowed_tools == ("Read", "Bash(git diff)")


def test_windows_line_ends_and_a_byte_order_mark_do_no_harm(tmp_path: Path) -> None:
    folder = write_skill(tmp_path, "a-skill")
    text = skill_text("a-skill", body="One.\nTwo.").replace("\n", "\r\n")
    (folder / "SKILL.md").write_bytes(b"\xef\xbb\xbf" + text.encode())
    entry = check(folder)
    assert entry.skill is not None
    assert entry.skill.instructions == "One.\nTwo."


@pytest.mark.parametrize("name", ["a", "a1", "pdf-processing", "0-9", "x" * 64, "a-b-c"])
def test_names_that_the_format_allows(name: str) -> None:
    assert is_name(name)
    assert parse(skill_text(name), FOLDER.with_name(name)).name == name


@pytest.mark.parametrize(
    "name",
    ["", "A", "-a", "a-", "a--b", "a_b", "a b", "a.b", "ä", "x" * 65, "a\n", "..", "a/b", "a\0"],
)
def test_names_that_it_does_not(name: str) -> None:
    assert not is_name(name)


@given(st.text(max_size=70))
def test_a_name_is_one_plain_part_of_a_path(name: str) -> None:
    if is_name(name):
        assert Path(name).parts == (name,)
        assert name not in (".", "..")
        assert name.isascii()


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("description: x", "line 1: the required field `name` is missing"),
        ("name: a-skill", "line 1: the required field `description` is missing"),
        ("name: A\ndescription: x", "line 2: `name` may hold lower-case letters, digits and single hyphens"),
        ("name: other\ndescription: x", "line 2: `name` is other, but the folder is a-skill"),
        (f"name: {'a' * 65}\ndescription: x", "line 2: `name` has 65 characters; at most 64 are allowed"),
        ("name: a-skill\ndescription:", "line 3: `description` must not be empty"),
        ("name: a-skill\ndescription: '  '", "line 3: `description` must not be empty"),
        (f"name: a-skill\ndescription: {'x' * 1025}", "line 3: `description` has 1025 characters"),
        ("name: a-skill\ndescription: [x]", "line 3: `description` must be a text"),
        ("name: a-skill\ndescription: x\ncompatibility: ''", "line 4: `compatibility` must not be empty"),
        (f"name: a-skill\ndescription: x\ncompatibility: {'x' * 501}", "line 4: `compatibility` has 501"),
        ("name: a-skill\ndescription: x\nlicense: {a: b}", "line 4: `license` must be a text"),
        ("name: a-skill\ndescription: x\nmetadata: [a]", "line 4: `metadata` must be a map of texts"),
        ("name: a-skill\ndescription: x\nmetadata:\n  k: [a]", "line 5: `metadata.k` must be a text"),
        ("name: a-skill\ndescription: x\nallowed-tools: {a: b}", "line 4: `allowed-tools` must be a text of"),
        ("name: a-skill\ndescription: x\nallowed-tools: [[a]]", "line 4: `allowed-tools` must be a text of"),
        ("name: a-skill\ndescription: x\nmodel: big", "line 4: `model` is no field of the format"),
        ("name: a-skill\nname: a-skill\ndescription: x", "line 3: the key `name` stands twice"),
        ("name: a-skill\ndescription: Use: when", "line 3: the head is not valid YAML: mapping values"),
        ("name: a-skill\ndescription: 'x", "the head is not valid YAML: while scanning a quoted scalar"),
        ("name: a-skill\ndescription: x\x07", "line 3: the head holds a character that YAML does not allow"),
        ('name: a-skill\ndescription: "x\\0"', "line 3: the head holds a control character"),
        ('name: a-skill\ndescription: "\\ud800"', "line 3: the head holds a control character"),
        ('name: a-skill\ndescription: "\\UFFFFFFFF"', "line 2: the head is not valid YAML"),
        ("? [a]\n: b", "line 2: a key must be a text"),
        ("- a", "line 2: the head must be a YAML mapping"),
        ("", "line 2: the head must be a YAML mapping"),
        ("just text", "line 2: the head must be a YAML mapping"),
        ("name: &a x\ndescription: *a", "line 2: YAML anchors (`&a`) are not allowed"),
        ("name: *a", "line 2: YAML aliases (`*a`) are not allowed"),
        ("name: !!python/object/apply:os.system [ls]", "line 2: YAML tags (`!…`) are not allowed"),
        ("name: !!str x", "line 2: YAML tags (`!…`) are not allowed"),
        ("metadata: {" + "a, " * 600 + "}", "line 2: the head has more than 500 keys, values and items"),
        ("metadata: {a: {b: {c: d}}}", "line 2: the head is nested too deeply"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(head: str, expected: str) -> None:
    found = faults(f"---\n{head}\n---\nbody")
    assert any(fault.startswith(expected) or expected in fault for fault in found), found


def test_all_faults_are_told_at_once_in_the_order_of_their_lines() -> None:
    found = faults("---\nlicense: []\nname: X\nextra: 1\n---\n")
    assert [fault.split(":")[0] for fault in found] == ["line 1", "line 2", "line 3", "line 4"]


def test_the_head_must_be_there() -> None:
    assert faults("# Title\n") == ["line 1: it must begin with a line `---`, the start of the YAML head"]
    assert faults("---\nname: a-skill\n") == [
        "line 1: the YAML head has no end: a second line `---` is missing"
    ]
    assert "characters" in faults(f"---\ndescription: {'x' * MAX_HEAD_CHARS}\n---\n")[0]


def test_an_alias_bomb_is_refused_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object) -> None:
        raise AssertionError("the head was composed")

    monkeypatch.setattr(yaml, "compose", explode)
    bomb = "a: &a [x, x]\n" + "".join(
        f"{c}: &{c} [*{b}, *{b}]\n" for b, c in zip("abcdefgh", "bcdefghi", strict=True)
    )
    assert "anchors" in faults(f"---\n{bomb}---\n")[0]
    # Nesting, too, ends the reading where it gets too deep, not where the recursion does.
    assert "too deeply" in faults(f"---\na: {'[' * 30_000}\n---\n")[0]


def test_a_file_of_ten_megabytes_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_it(*_: object) -> None:
        raise AssertionError("it was parsed")

    monkeypatch.setattr("kiln.skills.library.parse", read_it)
    folder = write_skill(tmp_path, "a-skill", skill_text("a-skill", body="x" * 10_000_000))
    (fault,) = check(folder).faults
    assert f"at most {MAX_FILE_BYTES} are allowed" in fault.message
    assert "10000" in fault.message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"---\nname: \xff\n---\n", "line 2: it is not UTF-8"),
        (b"---\nname: a\n---\nx\0y", "line 4: it holds a NUL character"),
    ],
)
def test_odd_bytes_are_named_with_their_line(tmp_path: Path, content: bytes, expected: str) -> None:
    folder = write_skill(tmp_path, "a-skill")
    (folder / "SKILL.md").write_bytes(content)
    assert str(check(folder).faults[0]) == expected


@given(st.text(max_size=300))
def test_any_head_is_either_read_or_refused(head: str) -> None:
    try:
        fields, _ = split(f"---\n{head}\n---\n")
    except Faulty as error:
        assert error.faults
    else:
        assert all(isinstance(key, str) for key in fields)


@given(
    st.lists(
        st.sampled_from([*"&*!%@`|>-?:{}[],'\"#\\ \n\ta1", "---", "\\U00110000", "<<", "\x85"]), max_size=40
    )
)
def test_any_yaml_is_either_read_or_refused(parts: list[str]) -> None:
    try:
        parse(f"---\nname: a-skill\ndescription: x\n{''.join(parts)}\n---\n", FOLDER)
    except Faulty as error:
        assert error.faults


def test_the_bundled_example_is_valid() -> None:
    for folder in (EXAMPLES / "skills").iterdir():
        entry = check(folder)
        assert entry.faults == ()
        assert entry.skill is not None
        assert entry.skill.questions
