"""The documents name every setting, command and flag there is, and none that is not."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
import typer

from kiln.cli.common import FLAGS
from kiln.cli.config import show
from kiln.cli.configuration import flag_name
from kiln.cli.main import app
from kiln.core.settings import TABLES, declarations, table_declarations

DOCS = Path(__file__).parents[2] / "docs"
COMMANDS: dict[str, click.Command] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def rows(text: str) -> list[list[str]]:
    """The cells of all table rows that begin with a name in code type."""
    found = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in found]


def test_configuration_lists_every_setting_as_declared() -> None:
    documented = rows((DOCS / "configuration.md").read_text(encoding="utf-8"))
    expected = []
    flags = set(FLAGS.values())
    for name, d in declarations().items():
        flag = f"`{flag_name(name)}`" if name in flags else ""
        default = f"`{show(d, d.default)}`" if d.default is not None or d.unlimited else "unset"
        expected.append(
            [f"`{d.key}`", d.allowed, default, f"`{d.environment_name}`", flag, d.doc.replace("|", r"\|")]
        )
    for family in TABLES:
        for d in table_declarations(family).values():
            default = f"`{show(d, d.default)}`" if d.default is not None else "unset"
            expected.append([f"`{d.key}`", d.allowed, default, d.doc.replace("|", r"\|")])
    assert documented == expected


def test_cli_names_every_command() -> None:
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^## `kiln (\w+)`", text, re.MULTILINE)) == set(COMMANDS)
    assert "`kiln --version`" in text


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_cli_lists_every_flag_of_a_command(name: str) -> None:
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", text.split(f"## `kiln {name}`")[1], flags=re.MULTILINE)[0]
    documented = {re.split(r"[` ]", cells[0].strip("`"))[0]: cells[-1] for cells in rows(section)}
    expected = {}
    for parameter in COMMANDS[name].params:
        if parameter.name != "help" and not isinstance(COMMANDS[name], click.Group):
            is_flag = parameter.param_type_name == "option"
            label = parameter.opts[0] if is_flag else parameter.metavar or ""
            expected[label.strip("[]")] = getattr(parameter, "help", "")
    assert documented == expected
