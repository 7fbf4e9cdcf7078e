"""Skills that the model uses by itself, through two function tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from kiln.skills.instructions import ACTIVATE_TOOL, READ_TOOL
from kiln.skills.library import SkillLibrary
from kiln.skills.offer import MAX_RESULT_CHARS, SkillOffer

from .folders import skill_text, write_skill

QUESTIONS = [
    {"slug": "unit", "text": "Which unit?", "default": "kg"},
    {"slug": "shop", "text": "Which shop?", "required": True},
    {"slug": "note", "text": "Anything else?"},
]


@pytest.fixture
def library(tmp_path: Path) -> SkillLibrary:
    head = f"metadata:\n  kiln-questions: {json.dumps(json.dumps(QUESTIONS))}"
    folder = write_skill(tmp_path, "asks", skill_text("asks", head, "Ask first."))
    (folder / "references").mkdir()
    (folder / "references" / "guide.md").write_text("the guide")
    write_skill(tmp_path, "plain")
    write_skill(tmp_path, "hidden")
    return SkillLibrary(tmp_path)


@pytest.fixture
def offer(library: SkillLibrary) -> SkillOffer:
    return library.offer(["asks", "plain"])


def test_the_catalog_holds_metadata_only(offer: SkillOffer) -> None:
    assert "- asks: Does a thing." in offer.catalog
    assert "Ask first." not in offer.catalog
    assert "hidden" not in offer.catalog
    assert ACTIVATE_TOOL in offer.catalog


def test_the_tools_are_function_definitions(offer: SkillOffer) -> None:
    functions: dict[str, Any] = {tool["function"]["name"]: tool["function"] for tool in offer.tools}
    assert set(functions) == {ACTIVATE_TOOL, READ_TOOL}
    for function in functions.values():
        Draft202012Validator.check_schema(function["parameters"])
        assert offer.handles(function["name"])
    accepts = Draft202012Validator(functions[READ_TOOL]["parameters"]).is_valid
    assert accepts({"name": "asks", "path": "references/guide.md"})
    assert not accepts({"name": "hidden", "path": "x"})
    assert not accepts({"name": "asks"})
    assert not offer.handles("calc_arithmetic")


def test_nothing_offered_is_no_tool_and_no_text(library: SkillLibrary) -> None:
    nothing = library.offer([])
    assert (nothing.catalog, nothing.tools, nothing.handles(ACTIVATE_TOOL)) == ("", (), False)


def test_activation_gives_instructions_open_questions_and_files(offer: SkillOffer) -> None:
    result = offer.run(ACTIVATE_TOOL, {"name": "asks"})
    assert (result.name, result.status, result.failed) == ("asks", "activated", False)
    assert "Ask first." in result.text
    assert '- unit: "kg"' in result.text
    assert "- shop: Which shop? (required)\n- note: Anything else?" in result.text
    assert "- references/guide.md" in result.text
    assert offer.run(ACTIVATE_TOOL, {"name": "plain"}).text == "# Skill: plain\n\nDo the thing."


def test_a_file_is_read_on_demand(offer: SkillOffer) -> None:
    result = offer.run(READ_TOOL, {"name": "asks", "path": "./references/guide.md"})
    assert (result.text, result.status, result.resource) == ("the guide", "resource", "references/guide.md")


@pytest.mark.parametrize(
    ("tool", "arguments", "status", "expected"),
    [
        (ACTIVATE_TOOL, {}, None, "needs a text `name`"),
        (ACTIVATE_TOOL, {"name": 5}, None, "needs a text `name`"),
        (ACTIVATE_TOOL, {"name": "hidden"}, "missing", "offered are asks, plain"),
        (ACTIVATE_TOOL, {"name": "../plain"}, "missing", "offered are asks, plain"),
        (ACTIVATE_TOOL, {"name": "asks", "path": "x"}, None, "takes no 'path'"),
        (READ_TOOL, {"name": "asks"}, None, "needs a text `path`"),
        (READ_TOOL, {"name": "asks", "path": ["x"]}, None, "needs a text `path`"),
        (READ_TOOL, {"name": "asks", "path": "../plain/SKILL.md"}, None, "neither `..` nor hidden"),
        (READ_TOOL, {"name": "hidden", "path": "SKILL.md"}, "missing", "offered are asks, plain"),
    ],
)
def test_a_call_that_does_not_fit_is_answered_with_the_reason(
    offer: SkillOffer, tool: str, arguments: dict[str, object], status: str | None, expected: str
) -> None:
    result = offer.run(tool, arguments)
    assert result.failed
    assert result.status == status
    assert expected in result.text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([ACTIVATE_TOOL, READ_TOOL]),
    st.dictionaries(
        st.sampled_from(["name", "path", "x"]), st.none() | st.integers() | st.text() | st.just("asks")
    ),
)
def test_whatever_the_model_sends_is_answered(
    offer: SkillOffer, tool: str, arguments: dict[str, object]
) -> None:
    result = offer.run(tool, arguments)
    assert result.text
    assert len(result.text) < MAX_RESULT_CHARS + 200
    assert len(result.name) <= 70
    assert result.failed != (result.status in ("activated", "resource"))


def test_a_skill_that_breaks_or_goes_during_the_exchange_is_missing(
    offer: SkillOffer, tmp_path: Path
) -> None:
    (tmp_path / "plain" / "SKILL.md").unlink()
    gone = offer.run(ACTIVATE_TOOL, {"name": "plain"})
    assert (gone.status, gone.failed) == ("missing", True)
    (tmp_path / "asks" / "SKILL.md").write_text("broken")
    broken = offer.run(ACTIVATE_TOOL, {"name": "asks"})
    assert (broken.status, broken.failed) == ("missing", True)
    assert "must begin with a line" in broken.text


def test_long_instructions_are_cut_and_say_so(offer: SkillOffer, tmp_path: Path) -> None:
    write_skill(tmp_path, "plain", skill_text("plain", body="x" * 100_000))
    text = offer.run(ACTIVATE_TOOL, {"name": "plain"}).text
    assert len(text) < MAX_RESULT_CHARS + 200
    assert f"only the first {MAX_RESULT_CHARS} are shown" in text
