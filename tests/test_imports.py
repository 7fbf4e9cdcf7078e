"""Which way imports go: a room names only rooms of a lower rank, whatever the place of the import."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import kiln

RANKS = {
    "core": 0,
    "wire": 0,
    "contracts": 0,
    "adapters": 1,
    "confine": 0,
    "loadgen": 1,
    "thinking": 1,
    "text": 1,
    "skills": 1,
    "store": 1,
    "tools": 1,
    "access": 2,
    "engine": 2,
    "dialects": 2,
    "backends": 3,
    "chat": 3,
    "native": 4,
    "http": 5,
    "cli": 6,
}
FREE = {"kiln", "kiln.__main__"}
ASSEMBLY = "kiln.cli.assembly"


def sources() -> dict[str, str]:
    """The text of every module of kiln, by its dotted name."""
    root = Path(kiln.__file__).parent
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = ["kiln", *path.relative_to(root).with_suffix("").parts]
        if parts[-1] == "__init__":
            # The trailing dot tells a package from a module, as relative imports need.
            found[".".join(parts[:-1]) + "."] = path.read_text(encoding="utf-8")
        else:
            found[".".join(parts)] = path.read_text(encoding="utf-8")
    return found


def imports(module: str, text: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a module imports from kiln, at any depth."""
    package = module[:-1] if module.endswith(".") else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            # `from kiln.text import scanner` names a module, `from kiln.text.scanner import Span` a value.
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "__import__"):
            names = [str(a.value) for a in node.args[:1] if isinstance(a, ast.Constant)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            names = [str(a.value) for a in node.args[:1] if isinstance(a, ast.Constant)]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "kiln")


def breaches(modules: Mapping[str, str]) -> list[str]:
    """Every import that the rules forbid, in words."""
    found = []
    for module, text in modules.items():
        name = module.rstrip(".")
        if name in FREE:
            continue
        room = name.split(".")[1]
        if room not in RANKS:
            found.append(f"{name}: {room} is not a known room")
            continue
        for line, target in imports(module, text):
            if target in ("kiln", "kiln.__version__"):
                continue
            other = target.split(".")[1]
            if other != room and not RANKS.get(other, 99) < RANKS[room]:
                found.append(f"{name}:{line} imports {target}, which is not of a lower rank")
            elif other == "backends" != room and not may_name_backend(name, target):
                found.append(f"{name}:{line} names a concrete backend: {target}")
    return found


def may_name_backend(module: str, target: str) -> bool:
    part = target.split(".")[2:3]
    if part == ["hub"]:
        return module.startswith("kiln.cli.")
    return module.rstrip(".") == ASSEMBLY or module.startswith(f"{ASSEMBLY}.")


def test_rooms_import_only_rooms_of_a_lower_rank() -> None:
    assert breaches(sources()) == []


def test_the_whole_tree_is_read() -> None:
    modules = sources()
    assert "kiln.cli.assembly." in modules
    assert "kiln.engine.loop" in modules
    named = {target for module, text in modules.items() for _, target in imports(module, text)}
    # One import at module level, one inside a function.
    assert "kiln.engine.schedule.scheduler.Scheduler" in named
    assert "kiln.backends.llamacpp.LlamaRunner" in named


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("kiln.core.turn", "import kiln.wire.kiln"),
        ("kiln.wire.kiln", "from kiln.core.tokens import Source"),
        ("kiln.thinking.gate", "from kiln.text import scanner"),
        ("kiln.engine.loop", "def late():\n    if True:\n        from kiln.chat.service import ChatService"),
        ("kiln.engine.loop", "from ..http import app"),
        ("kiln.text.", "from ..engine import ports"),
        ("kiln.text.shield", "from .. import http"),
        ("kiln.text.shield", "from kiln import http"),
        ("kiln.core.errors", "import importlib\nimportlib.import_module('kiln.text.shield')"),
        ("kiln.http.app", "from kiln.backends.llamacpp import LlamaModel"),
        ("kiln.http.app", "from kiln.backends import hub"),
        ("kiln.cli.serve", "import kiln.backends.llamacpp"),
        ("kiln.chat.service", "from kiln.backends.llamacpp import LlamaModel"),
        ("kiln.http.app", "from kiln.attic import things"),
        ("kiln.attic.things", ""),
    ],
)
def test_a_breach_is_found(module: str, text: str) -> None:
    assert len(breaches({module: text})) == 1


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("kiln.engine.loop", "from kiln.engine.schedule.scheduler import Step"),
        ("kiln.engine.loop", "from .schedule.scheduler import Step"),
        ("kiln.engine.loop", "from kiln.core import tokens\nfrom kiln.thinking.gate import CloseSequence"),
        ("kiln.cli.assembly", "def make():\n    from kiln.backends.llamacpp import LlamaRunner"),
        ("kiln.cli.common", "from kiln.backends.hub import resolve_model"),
        ("kiln.backends.llamacpp", "from kiln.backends.hub import resolve_model"),
        ("kiln.http.app", "from kiln import __version__\nimport kilnfire.core, os.path"),
        ("kiln.__main__", "from kiln.cli.main import app"),
        ("kiln.", "from kiln.http import app"),
    ],
)
def test_what_is_allowed_is_no_breach(module: str, text: str) -> None:
    assert breaches({module: text}) == []
