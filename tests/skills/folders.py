"""Skills and agents on disk, for the tests."""

from __future__ import annotations

from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples" / "native"
HEAD = "name: {name}\ndescription: Does a thing. Use when it is asked for."


def skill_text(name: str, head: str = "", body: str = "Do the thing.") -> str:
    """A SKILL.md with more lines in its head."""
    return f"---\n{HEAD.format(name=name)}\n{head}\n---\n{body}\n"


def write_skill(root: Path, name: str, text: str | None = None) -> Path:
    """The skill's folder; `text` is the whole SKILL.md."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "SKILL.md").write_text(skill_text(name) if text is None else text, encoding="utf-8")
    return folder
