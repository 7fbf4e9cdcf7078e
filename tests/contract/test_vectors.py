"""The vectors of the thinking-budget contract, loaded once and run by every consumer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from contract.validators import is_valid, validate
from kiln import contracts
from kiln.cli.chat.command import parse_flag
from kiln.cli.configuration import load_settings
from kiln.core.budgets import Budget, Limit, Outcome, Trigger
from kiln.core.errors import ConfigError, InvalidField
from kiln.core.settings import Settings
from kiln.dialects.kiln import decode_chat, to_turn
from kiln.thinking.budget import Layer, resolve_budget, resolve_limit, to_outcome, to_record
from kiln.thinking.records import InvalidRecord, read_recent_record, read_record, to_recent_record
from kiln.wire import kiln as wire

Vector = dict[str, Any]
VECTORS: dict[str, list[Vector]] = json.loads(contracts.load(contracts.THINKING_BUDGET_VECTORS))
TOKENS, TIME = "thinking_budget_tokens", "thinking_budget_ms"


def each(kind: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("vector", VECTORS[kind], ids=[v["name"] for v in VECTORS[kind]])


def as_json(value: msgspec.Struct) -> Vector:
    decoded: Vector = json.loads(msgspec.json.encode(value))
    return decoded


def effective_of(budget: Budget) -> Vector:
    record = as_json(to_record(budget, applied=False, outcome=None))
    del record["applied"], record["triggered"]
    return record


# The resolution, used by the server, the command line and evaluations.


@each("resolution")
def test_core_resolves(vector: Vector) -> None:
    def limit(name: str) -> Limit:
        layers = [(Layer(layer), said.get(name, UNSET)) for layer, said in vector["layers"].items()]
        return resolve_limit(vector["server_defaults"][f"default_{name}"], layers)

    assert effective_of(Budget(limit(TOKENS), limit(TIME))) == vector["effective"]


def test_vectors_reach_every_layer_and_source() -> None:
    assert {layer for v in VECTORS["resolution"] for layer in v["layers"]} == set(map(str, Layer))
    records = [v["effective"] for v in VECTORS["resolution"]] + [
        v["record"] for v in VECTORS["valid_records"]
    ]
    for field in ("tokens_source", "time_source"):
        assert {record[field] for record in records} >= set(wire.SOURCES) - {"example_unlimited", "unknown"}
    assert {r.get("trigger") for r in records} == {None, *wire.TRIGGERS}


# The HTTP surface.

REQUESTS = [v for v in VECTORS["resolution"] if set(v["layers"]) <= {"request"}]


@pytest.mark.parametrize("vector", REQUESTS, ids=[v["name"] for v in REQUESTS])
def test_a_chat_request_resolves(vector: Vector) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], **vector["layers"].get("request", {})}
    turn = to_turn(decode_chat(json.dumps(body).encode()))
    defaults = vector["server_defaults"]
    budget = resolve_budget(
        default_tokens=defaults[f"default_{TOKENS}"],
        default_time_ms=defaults[f"default_{TIME}"],
        request_tokens=turn.budget_tokens,
        request_time_ms=turn.budget_ms,
    )
    assert effective_of(budget) == vector["effective"]


@pytest.mark.parametrize("vector", REQUESTS, ids=[v["name"] for v in REQUESTS])
def test_a_batch_request_keeps_the_three_states(vector: Vector) -> None:
    said = vector["layers"].get("request", {})
    body = json.dumps({"prompts": [[]], **said})
    request = msgspec.json.decode(body, type=wire.BatchCompletionRequest)
    assert request.thinking_budget_tokens == said.get(TOKENS, UNSET)
    assert request.thinking_budget_ms == said.get(TIME, UNSET)


@each("invalid_requests")
def test_a_request_is_refused_by_field(vector: Vector) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], **vector["request"]}
    with pytest.raises(InvalidField) as refusal:
        decode_chat(json.dumps(body).encode())
    assert refusal.value.param == vector["field"]
    with pytest.raises(msgspec.ValidationError, match=vector["field"]):
        msgspec.json.decode(
            json.dumps({"prompts": [[]], **vector["request"]}), type=wire.BatchCompletionRequest
        )


# Settings: environment, file and flags.


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory without a settings file."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def toml(server: Mapping[str, object]) -> str:
    """JSON values of these kinds are TOML values as well."""
    return "[server]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in server.items())


def check_defaults(settings: Settings, vector: Vector) -> None:
    server = settings.server
    assert {
        "default_thinking_budget_tokens": server.default_thinking_budget_tokens,
        "default_thinking_budget_ms": server.default_thinking_budget_ms,
    } == vector["defaults"]
    budget = resolve_budget(
        default_tokens=server.default_thinking_budget_tokens,
        default_time_ms=server.default_thinking_budget_ms,
    )
    assert effective_of(budget) == vector["effective"]


def flags_of(vector: Vector) -> dict[str, str]:
    """The same texts as flags."""
    return {f"server.{n.removeprefix('KILN_SERVER_').lower()}": t for n, t in vector["environment"].items()}


@each("server_defaults")
def test_settings_from_the_environment(vector: Vector, away: Path) -> None:
    check_defaults(load_settings(config_path=None, environment=vector["environment"], flags={}), vector)


@each("server_defaults")
def test_settings_from_a_file(vector: Vector, away: Path) -> None:
    (away / "kiln.toml").write_text(toml(vector["file"]), encoding="utf-8")
    check_defaults(load_settings(config_path=None, environment={}, flags={}), vector)


@each("server_defaults")
def test_settings_from_flags(vector: Vector, away: Path) -> None:
    check_defaults(load_settings(config_path=None, environment={}, flags=flags_of(vector)), vector)
    for key, text in flags_of(vector).items():
        name = key.removeprefix("server.default_")
        assert parse_flag(name, key, text) == vector["defaults"][f"default_{name}"]


@each("invalid_server_defaults")
def test_malformed_settings_stop_the_start(vector: Vector, away: Path) -> None:
    if "environment" in vector:
        with pytest.raises(ConfigError, match=vector["key"].upper()):
            load_settings(config_path=None, environment=vector["environment"], flags={})
        with pytest.raises(ConfigError, match=vector["key"]):
            load_settings(config_path=None, environment={}, flags=flags_of(vector))
    (away / "kiln.toml").write_text(toml(vector["file"]), encoding="utf-8")
    with pytest.raises(ConfigError, match=vector["key"]):
        load_settings(config_path=None, environment={}, flags={})


# Records, written and read.


def budget_of(record: Vector) -> Budget:
    return Budget(
        Limit(record.get("max_tokens"), record["tokens_source"]),
        Limit(record.get("max_time_ms"), record["time_source"]),
    )


def outcome_of(record: Vector) -> Outcome | None:
    if "closed" not in record:
        return None
    trigger = Trigger(record["trigger"]) if "trigger" in record else None
    return Outcome(trigger, record["closed"], record["thinking_tokens"], record["thinking_time_ms"])


@each("valid_records")
def test_valid_records_are_written_and_read(vector: Vector) -> None:
    record = vector["record"]
    outcome = outcome_of(record)
    assert as_json(to_record(budget_of(record), applied=record["applied"], outcome=outcome)) == record
    assert as_json(read_record(record)) == record
    if outcome is not None:
        assert validate("outcome", as_json(to_outcome(outcome))) == []


@each("valid_recent_records")
def test_recent_records_are_written_and_read(vector: Vector) -> None:
    record = vector["record"]
    written = to_recent_record(budget_of(record), applied=record.get("applied"), outcome=outcome_of(record))
    assert as_json(written) == record
    assert as_json(read_recent_record(record)) == record


@each("legacy_records")
def test_legacy_records_are_read_and_come_out_flat(vector: Vector) -> None:
    before = json.dumps(vector["record"])
    assert as_json(read_record(vector["record"])) == vector["reads_as"]
    assert json.dumps(vector["record"]) == before
    assert as_json(read_record(vector["reads_as"])) == vector["reads_as"]


@each("invalid_records")
def test_invalid_records_are_refused_with_their_reason(vector: Vector) -> None:
    with pytest.raises(InvalidRecord) as refusal:
        read_record(vector["record"])
    assert refusal.value.reason == vector["reason"], str(refusal.value)


@each("invalid_recent_records")
def test_invalid_recent_records_are_refused_with_their_reason(vector: Vector) -> None:
    with pytest.raises(InvalidRecord) as refusal:
        read_recent_record(vector["record"])
    assert refusal.value.reason == vector["reason"], str(refusal.value)


# The schemas.


def test_schemas_accept_what_the_vectors_say() -> None:
    for vector in VECTORS["resolution"]:
        assert validate("effective", vector["effective"]) == []
        assert validate("ThinkingBudgetConfigurationMetadata", vector["effective"]) == []
        assert validate("serverDefaults", vector["server_defaults"]) == []
        for said in vector["layers"].values():
            assert validate("request", said) == []
    for vector in VECTORS["server_defaults"]:
        assert validate("serverDefaults", vector["defaults"]) == []
        assert validate("serverDefaults", vector["file"]) == []
        assert validate("effective", vector["effective"]) == []
    for vector in VECTORS["valid_records"]:
        assert validate("record", vector["record"]) == []
    for vector in VECTORS["valid_recent_records"]:
        assert validate("recentRecord", vector["record"]) == []
    for vector in VECTORS["legacy_records"]:
        assert validate("record", vector["reads_as"]) == []


def test_schemas_refuse_what_the_vectors_say() -> None:
    for vector in VECTORS["invalid_server_defaults"]:
        assert not is_valid("serverDefaults", vector["file"]), vector["name"]
    for vector in VECTORS["invalid_requests"]:
        assert not is_valid("request", vector["request"]), vector["name"]
    for vector in VECTORS["invalid_records"] + VECTORS["legacy_records"]:
        assert not is_valid("record", vector["record"]), vector["name"]
    for vector in VECTORS["invalid_recent_records"] + VECTORS["legacy_records"]:
        assert not is_valid("recentRecord", vector["record"]), vector["name"]
