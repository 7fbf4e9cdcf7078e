"""A skill's files: read inside the skill only, as text, within bounds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kiln.skills.library import check
from kiln.skills.resources import MAX_LISTED, MAX_RESOURCE_BYTES, ResourceRefused, listing, read_resource
from kiln.skills.skill import Skill

from .folders import write_skill

SECRET = "do not show this"


@pytest.fixture
def skill(tmp_path: Path) -> Skill:
    """A skill with some files, a secret beside it, and links of all kinds."""
    (tmp_path / "secret.txt").write_text(SECRET)
    folder = write_skill(tmp_path, "a-skill")
    other = write_skill(tmp_path, "b-skill")
    (other / "private.md").write_text(SECRET)
    (folder / "references").mkdir()
    (folder / "references" / "guide.md").write_text("the guide: ü\n", encoding="utf-8")
    (folder / "assets" / "deep").mkdir(parents=True)
    (folder / "assets" / "deep" / "table.csv").write_text("a,b\n")
    (folder / "assets" / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (folder / "assets" / "nul.txt").write_bytes(b"a\0b")
    (folder / ".env").write_text(SECRET)
    (folder / "out.txt").symlink_to("../secret.txt")
    (folder / "out").symlink_to("../b-skill")
    (folder / "in.md").symlink_to("references/guide.md")
    (folder / "loop").symlink_to("loop")
    (folder / "nowhere").symlink_to("not-there")
    os.mkfifo(folder / "pipe")
    found = check(folder).skill
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("path", "plain", "text"),
    [
        ("references/guide.md", "references/guide.md", "the guide: ü\n"),
        ("./references//guide.md", "references/guide.md", "the guide: ü\n"),
        ("assets/deep/table.csv", "assets/deep/table.csv", "a,b\n"),
        ("in.md", "in.md", "the guide: ü\n"),
    ],
)
def test_files_of_the_skill_are_read(skill: Skill, path: str, plain: str, text: str) -> None:
    assert read_resource(skill, path) == (plain, text)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("../secret.txt", "neither `..` nor hidden"),
        ("references/../../secret.txt", "neither `..` nor hidden"),
        ("..", "neither `..` nor hidden"),
        (".env", "neither `..` nor hidden"),
        ("/etc/passwd", "must be relative"),
        ("//etc/passwd", "must be relative"),
        ("..\\secret.txt", "must be relative"),
        ("C:secret.txt", "must be relative"),
        ("file:///etc/passwd", "must be relative"),
        ("references/guide.md\0", "control characters"),
        ("references/gu\nide.md", "control characters"),
        ("\ud800", "control characters"),
        ("", "short text"),
        ("   ", "short text"),
        ("a/" * 400, "short text"),
        (".", "must name a file"),
        ("././", "must name a file"),
        ("out.txt", "leads out"),
        ("out/private.md", "leads out"),
        ("nowhere", "there is no file"),
        ("not-there.md", "there is no file"),
        ("references/guide.md/more", "there is no file"),
        ("x" * 300, "cannot be opened"),
        ("loop", "cannot be"),
        ("pipe", "not a regular file"),
        ("references", "not a regular file"),
        ("assets/image.png", "not a text file"),
        ("assets/nul.txt", "not a text file"),
    ],
)
def test_everything_else_is_refused(skill: Skill, path: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ResourceRefused) as caught:
        read_resource(skill, path)
    message = str(caught.value)
    if path != "loop":  # which Python 3.13 reports in another way
        assert reason in message
    assert SECRET not in message
    assert str(tmp_path) not in message


PIECES = st.sampled_from(
    [
        "..",
        ".",
        "/",
        "//",
        "\\",
        "~",
        "secret.txt",
        "a-skill",
        "b-skill",
        "private.md",
        "out",
        "out.txt",
        ".env",
    ]
    + ["references", "guide.md", "%2e%2e", "\0", "…", "\uff0e\uff0e", "in.md", " "]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(st.lists(PIECES, max_size=8), st.sampled_from(["", "/"]))
def test_no_path_leads_out(skill: Skill, pieces: list[str], between: str) -> None:
    try:
        _, text = read_resource(skill, between.join(pieces))
    except ResourceRefused as error:
        assert SECRET not in str(error)
    else:
        assert SECRET not in text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text())
def test_any_text_is_read_or_refused(skill: Skill, path: str) -> None:
    try:
        read_resource(skill, path)
    except ResourceRefused as error:
        assert len(str(error)) < 400


@pytest.mark.parametrize("unit", ["x", "ü", "€", "\N{GRINNING FACE}"])
@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_a_large_file_is_cut_between_characters_and_says_so(skill: Skill, unit: str, shift: int) -> None:
    content = "a" * shift + unit * (MAX_RESOURCE_BYTES + 1)
    (skill.folder / "big.txt").write_text(content, encoding="utf-8")
    _, text = read_resource(skill, "big.txt")
    kept, _, note = text.rpartition("\n")
    assert content.startswith(kept)
    assert MAX_RESOURCE_BYTES - 4 < len(kept.encode()) <= MAX_RESOURCE_BYTES
    assert note.startswith(f"[cut here: the file has {len(content.encode())} bytes")


def test_a_file_of_just_the_largest_size_is_whole(skill: Skill) -> None:
    (skill.folder / "full.txt").write_text("x" * MAX_RESOURCE_BYTES)
    assert read_resource(skill, "full.txt")[1] == "x" * MAX_RESOURCE_BYTES


def test_an_end_inside_a_character_is_no_text(skill: Skill) -> None:
    (skill.folder / "half.txt").write_bytes("ü".encode()[:1])
    with pytest.raises(ResourceRefused, match="not a text file"):
        read_resource(skill, "half.txt")


def test_the_listing_names_what_can_be_read(skill: Skill) -> None:
    found = listing(skill)
    assert found.paths == (
        "assets/deep/table.csv",
        "assets/image.png",
        "assets/nul.txt",
        "in.md",
        "references/guide.md",
    )
    assert not found.more


def test_the_listing_is_bounded(skill: Skill) -> None:
    for i in range(MAX_LISTED + 5):
        (skill.folder / "references" / f"{i}.md").touch()
    found = listing(skill)
    assert len(found.paths) == MAX_LISTED
    assert found.more
