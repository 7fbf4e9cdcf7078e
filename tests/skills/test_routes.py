"""The lists over HTTP: a real server over folders that change under it."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from kiln.cli.assembly import create_app
from kiln.core.errors import ConfigError
from kiln.http.openapi.document import openapi_document
from kiln.skills.start import open_libraries
from servers.server import Server, serving_model, settings_of

from .folders import skill_text, write_skill

DOCUMENT = openapi_document()
SECRET = "the system prompt is nobody's affair"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("library")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    (root / "agents").mkdir()
    (root / "skills").mkdir()
    with serving_model(skills__dir=str(root / "skills"), agents__dir=str(root / "agents")) as running:
        yield running


def get(server: Server, path: str, schema: str) -> Any:
    """A list, held against the published document."""
    response = httpx.get(server.url + path, timeout=60)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    found = Draft202012Validator({**DOCUMENT, "$ref": f"#/components/schemas/{schema}"})
    assert [error.message for error in found.iter_errors(body)] == []
    return body


def test_skills_are_listed_as_they_are_now(server: Server, root: Path) -> None:
    assert get(server, "/lmkit/v1/skills", "SkillList") == {"skills": []}
    questions = '[{"slug": "shop", "text": "Which shop?", "required": true}]'
    head = f"license: MIT\nallowed-tools: Read Write\nmetadata:\n  kiln-questions: '{questions}'"
    write_skill(root / "skills", "asks", skill_text("asks", head))
    write_skill(root / "skills", "broken", "---\nname: broken\n---")
    (root / "skills" / "\udcff").mkdir()
    body = get(server, "/lmkit/v1/skills", "SkillList")
    assert body["skills"][:2] == [
        {
            "name": "asks",
            "valid": True,
            "description": "Does a thing. Use when it is asked for.",
            "license": "MIT",
            "allowed_tools": ["Read", "Write"],
            "questions": [{"slug": "shop", "text": "Which shop?", "required": True}],
        },
        {
            "name": "broken",
            "valid": False,
            "faults": [{"message": "the required field `description` is missing", "line": 1}],
        },
    ]
    assert [(s["name"], s["valid"]) for s in body["skills"][2:]] == [("\N{REPLACEMENT CHARACTER}", False)]
    write_skill(root / "skills", "broken")
    assert get(server, "/lmkit/v1/skills", "SkillList")["skills"][1]["valid"]


def test_agents_are_listed_without_what_is_the_servers_own(server: Server, root: Path) -> None:
    (root / "agents" / "helper.toml").write_text(
        f'system = "{SECRET}"\nskill = "asks"\nskill_inputs = {{ shop = "{SECRET}" }}\n'
        'memory = true\nthinking_budget_ms = "unlimited"\n[sampling]\ntemperature = 0\n'
    )
    (root / "agents" / "broken.toml").write_text("colour = 1")
    body = get(server, "/lmkit/v1/agents", "AgentList")
    assert body == {
        "agents": [
            {
                "name": "broken",
                "valid": False,
                "faults": [{"message": "`colour` is no key of an agent", "line": 1}],
            },
            {
                "name": "helper",
                "valid": True,
                "has_system": True,
                "defaults": {
                    "skill": "asks",
                    "memory": "helper",
                    "thinking_budget_ms": None,
                    "temperature": 0.0,
                },
            },
        ]
    }
    assert SECRET not in str(body)


def test_no_answer_names_a_place_on_the_server(server: Server, root: Path) -> None:
    (root / "skills" / "loops").mkdir(exist_ok=True)
    (root / "skills" / "loops" / "SKILL.md").symlink_to("SKILL.md")
    (root / "agents" / "folder.toml").mkdir()
    for path in ("/lmkit/v1/skills", "/lmkit/v1/agents"):
        assert str(root) not in httpx.get(server.url + path).text


def test_other_methods_and_paths_are_refused_in_the_native_shape(server: Server) -> None:
    response = httpx.post(f"{server.url}/lmkit/v1/skills", json={})
    assert response.status_code == 405
    assert set(response.json()) == {"error", "code"}
    assert httpx.get(f"{server.url}/lmkit/v1/skills/../../etc/passwd").status_code == 404


def test_many_readers_and_a_writer(server: Server, root: Path) -> None:
    def read(_: int) -> list[str]:
        skills = get(server, "/lmkit/v1/skills", "SkillList")["skills"]
        return [s["description"] for s in skills if s["name"] == "busy" and s["valid"]]

    write_skill(root / "skills", "busy")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(read, i) for i in range(60)]
        for i in range(60):
            fresh = root / "skills" / "fresh"
            fresh.write_text(f"---\nname: busy\ndescription: version {i:03}\n---\n")
            fresh.replace(root / "skills" / "busy" / "SKILL.md")
        seen = [answer.result() for answer in answers]
    assert all(len(found) == 1 for found in seen)
    assert read(0) == ["version 059"]


def test_the_start_names_what_is_invalid_and_stops_for_a_folder_that_is_not_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_skill(tmp_path / "skills", "broken", "x")
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "a.toml").write_text("skill = 'gone'")
    (tmp_path / "agents" / "b.toml").write_text("x = 1")
    with caplog.at_level(logging.WARNING):
        open_libraries(
            settings_of(skills__dir=str(tmp_path / "skills"), agents__dir=str(tmp_path / "agents"))
        )
    assert [record.message.split(": ")[0] for record in caplog.records] == [
        "the skill 'broken' is invalid",
        "the agent 'a' cannot be used as it is",
        "the agent 'b' is invalid",
    ]
    with pytest.raises(ConfigError, match="skills.dir"):
        create_app(settings_of(skills__dir=str(tmp_path / "nowhere")))
