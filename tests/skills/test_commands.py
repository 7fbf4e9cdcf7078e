"""`kiln skills` and `kiln agents`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kiln.cli.main import app

from .folders import EXAMPLES, write_skill


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of its own, without settings from outside."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KILN_CONFIG", raising=False)
    return tmp_path


def kiln(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_the_examples_pass_both_checks(here: Path) -> None:
    (here / "kiln.toml").write_text(
        f"[skills]\ndir = '{EXAMPLES / 'skills'}'\n[agents]\ndir = '{EXAMPLES / 'agents'}'\n"
    )
    checked = kiln("skills", "check")
    assert (checked.exit_code, checked.stdout) == (0, "skills: 1, with faults: 0\n")
    checked = kiln("agents", "check")
    assert (checked.exit_code, checked.stdout) == (0, "agents: 1, with faults: 0\n")
    assert kiln("skills", "list").stdout.startswith("unit-price\tcurrency\tWorks out what one piece")
    assert kiln("agents", "list").stdout.startswith(
        "shopper\tsystem, skill, skill_inputs, server_tools, memory"
    )


def test_faults_come_with_their_place_and_status_1(here: Path) -> None:
    write_skill(here / "skills", "good")
    write_skill(here / "skills", "bad", "---\nname: worse\nextra: 1\n---\n")
    (here / "skills" / "od\x1bd").mkdir()
    checked = kiln("skills", "check", "skills")
    assert checked.exit_code == 1
    assert checked.stdout.splitlines() == [
        "bad/SKILL.md:1: the required field `description` is missing",
        "bad/SKILL.md:2: `name` is worse, but the folder is bad: they must be the same",
        "bad/SKILL.md:3: `extra` is no field of the format; own ones belong under `metadata`",
        "od\N{REPLACEMENT CHARACTER}d/SKILL.md: the folder has no SKILL.md",
        "skills: 3, with faults: 2",
    ]
    listed = kiln("skills", "list", "skills")
    assert listed.exit_code == 0
    assert (
        listed.stdout.splitlines()[0] == "bad\t\tinvalid: line 1: the required field `description` is missing"
    )


def test_one_skill_may_be_named_alone(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_skill(here, "good")
    assert kiln("skills", "check", str(folder)).stdout == "skills: 1, with faults: 0\n"
    # Also from within, where its name is not part of the path.
    monkeypatch.chdir(folder)
    assert kiln("skills", "check", ".").stdout == "skills: 1, with faults: 0\n"


def test_agents_are_held_against_the_skills(here: Path) -> None:
    write_skill(here / "skills", "plain")
    write_skill(here / "skills", "broken", "x")
    agents = here / "agents"
    agents.mkdir()
    (agents / "a.toml").write_text("skill = 'plain'\nskill_inputs = { shop = 'x' }")
    (agents / "b.toml").write_text("skills = ['plain', 'gone', 'broken']")
    (agents / "c.toml").write_text("skill = 'plain'")
    (agents / "d.toml").write_text("\ncolour = 1")
    (here / "kiln.toml").write_text("[agents]\ndir = 'agents'\n[skills]\ndir = 'skills'\n")
    checked = kiln("agents", "check")
    assert checked.exit_code == 1
    lines = checked.stdout.splitlines()
    assert lines[0] == "a.toml: `skill_inputs.shop`: the skill plain has no such question"
    assert lines[1] == "b.toml: there is no skill 'gone' on this server"
    assert lines[2].startswith("b.toml: the skill broken is invalid: line 1:")
    assert lines[3:] == ["d.toml:2: `colour` is no key of an agent", "agents: 4, with faults: 3"]
    (here / "kiln.toml").unlink()
    assert kiln("agents", "check", "agents").stdout.splitlines()[-1] == "agents: 4, with faults: 1"


@pytest.mark.parametrize("command", ["list", "check"])
@pytest.mark.parametrize("what", ["skills", "agents"])
def test_no_folder_is_a_plain_error(here: Path, what: str, command: str) -> None:
    unset = kiln(what, command)
    assert unset.exit_code == 2
    assert unset.stderr.startswith(f"kiln: no folder of {what}\nhint: ")
    missing = kiln(what, command, "not-there")
    assert (missing.exit_code, missing.stderr.splitlines()[0]) == (2, "kiln: not-there is not a folder")
    (here / "kiln.toml").write_text(f"[{what}]\ndir = 'gone'")
    gone = kiln(what, command)
    assert gone.exit_code == 2
    assert f"{what}.dir = 'gone' is not a folder" in gone.stderr
