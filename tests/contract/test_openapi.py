"""The OpenAPI document, the page that shows it, and the routes that publish the contracts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator
from starlette.applications import Starlette
from starlette.routing import Route
from typer.testing import CliRunner

from contract.validators import schemas, validate_error
from kiln import contracts
from kiln.cli.contracts import contracts as contracts_command
from kiln.core.errors import KilnError
from kiln.core.settings import Settings, settings_as_json
from kiln.http.app import ROUTES
from kiln.http.openapi import agreement
from kiln.http.openapi.document import contract_route, docs_page, openapi_document, openapi_route, page
from kiln.http.problems import EXCEPTION_HANDLERS, error_body
from kiln.wire import kiln as wire

DOCUMENT = openapi_document()


def component(name: str) -> Draft202012Validator:
    return Draft202012Validator({**DOCUMENT, "$ref": f"#/components/schemas/{name}"})


def walk(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from walk(inner)


def operations() -> list[dict[str, Any]]:
    return [operation for methods in DOCUMENT["paths"].values() for operation in methods.values()]


def test_every_route_of_the_server_is_described() -> None:
    for route in ROUTES:
        for method in (route.methods or set()) - {"HEAD"}:
            path = route.path.replace(":path}", "}")
            assert method.lower() in DOCUMENT["paths"].get(path, {}), f"{method} {path}"


def test_every_reference_leads_somewhere() -> None:
    for node in walk(DOCUMENT):
        if isinstance(node.get("$ref"), str):
            target: Any = DOCUMENT
            for part in node["$ref"].removeprefix("#/").split("/"):
                target = target[part]


def test_operations_are_named_once_and_answer() -> None:
    ids = [operation["operationId"] for operation in operations()]
    assert len(ids) == len(set(ids))
    tags = {tag["name"] for tag in DOCUMENT["tags"]}
    for operation in operations():
        assert set(operation["tags"]) <= tags
        assert any(status < "300" for status in operation["responses"])


def test_schemas_are_those_of_the_contracts() -> None:
    names = set(DOCUMENT["components"]["schemas"])
    assert set(schemas()[contracts.INFERENCE]["$defs"]) <= names
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_examples_hold() -> None:
    seen = 0
    responses = [r for o in operations() for r in o["responses"].values()]
    bodies = [o["requestBody"] for o in operations() if "requestBody" in o]
    for holder in [*responses, *bodies, *DOCUMENT["components"]["responses"].values()]:
        for media in holder.get("content", {}).values():
            values = [example["value"] for example in media.get("examples", {}).values()]
            values += [media["example"]] if "example" in media else []
            for value in values:
                seen += 1
                assert component(media["schema"]["$ref"].rsplit("/", 1)[1]).is_valid(value), value
    assert seen > 20


def test_every_error_is_listed_under_its_status() -> None:
    waiting = [KilnError]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.__module__ == "kiln.core.errors" and not kind.__subclasses__() and kind.type != "setup_error":
            examples = DOCUMENT["components"]["responses"][f"Error{kind.status}"]["content"]
            assert kind.code in examples["application/json"]["examples"]
            assert validate_error(json.loads(error_body(kind("x", param="y")))) == []


def test_the_configuration_is_described_as_it_is_served() -> None:
    served = {"settings": settings_as_json(Settings.default()), "resolved": {}}
    assert list(component("Configuration").iter_errors(served)) == []
    served["settings"]["server"]["port"]["value"] = "8420"
    assert not component("Configuration").is_valid(served)


def test_the_page_is_complete_in_itself() -> None:
    text = page()
    assert "{{" not in text
    # Nothing is fetched: no address in an attribute or a stylesheet, but the link to the document.
    assert re.findall(r"(?:src|srcset|action)=|\burl\(|@import|fetch\(", text) == []
    embedded = text.split('id="document">')[1].split("</script>")[0]
    assert json.loads(embedded) == DOCUMENT


async def get(path: str) -> tuple[int, dict[str, str], bytes]:
    """A GET of an application that has these routes alone."""
    import httpx

    app = Starlette(
        routes=[
            Route("/contracts/{name}", contract_route),
            Route("/openapi.json", openapi_route),
            Route("/docs", docs_page),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
    )
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://kiln") as client:
        response = await client.get(path)
    return response.status_code, dict(response.headers), response.content


@pytest.mark.parametrize("name", contracts.names())
async def test_contracts_are_published(name: str) -> None:
    status, headers, content = await get(f"/contracts/{name}")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert content == contracts.load(name)


@pytest.mark.parametrize("name", ["nothing.json", "__init__.py", "..%2fpy.typed"])
async def test_only_contracts_are_published(name: str) -> None:
    status, _, content = await get(f"/contracts/{name}")
    assert status == 404
    assert validate_error(json.loads(content)) == []


async def test_the_document_and_its_page_are_published() -> None:
    status, headers, content = await get("/openapi.json")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(content) == DOCUMENT
    status, headers, content = await get("/docs")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert content.decode() == page()


def test_the_command_lists_and_prints() -> None:
    listed = CliRunner().invoke(contracts_command, ["list"])
    assert listed.exit_code == 0
    assert [line.split()[0] for line in listed.output.splitlines()] == list(contracts.names())
    for name in contracts.names():
        printed = CliRunner().invoke(contracts_command, ["print", name])
        assert (printed.exit_code, printed.stdout.encode()) == (0, contracts.load(name))
    assert CliRunner().invoke(contracts_command, ["print", "nothing"]).exit_code == 2


def test_the_command_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = CliRunner().invoke(contracts_command, ["check"])
    assert checked.exit_code == 0
    for schema in schemas().values():
        for definition in schema["$defs"]:
            assert f"{definition}: agrees with" in checked.output

    class Usage(msgspec.Struct):
        prompt_tokens: int

    monkeypatch.setattr(wire, "Usage", Usage)
    monkeypatch.setattr(agreement, "struct_names", lambda: ["Usage"])
    checked = CliRunner().invoke(contracts_command, ["check"])
    assert checked.exit_code == 1
    assert "Usage: differs" in checked.output
    assert "Usage.total_tokens: only in the contract" in checked.output
