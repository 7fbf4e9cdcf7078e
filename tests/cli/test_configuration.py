"""Where settings come from, which source wins, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kiln.cli.configuration import load_settings
from kiln.cli.main import app
from kiln.core.errors import ConfigError
from kiln.core.settings import SECTIONS, Settings, declarations, settings_as_json


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No kiln.toml and no KILN_ variable of the machine reaches a test."""
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("KILN_")]:
        monkeypatch.delenv(name)
    return tmp_path


def load(
    file: str | None = None, environment: dict[str, str] | None = None, flags: dict[str, object] | None = None
) -> Settings:
    path = None
    if file is not None:
        path = Path("given.toml")
        path.write_text(file, encoding="utf-8")
    return load_settings(config_path=path, environment=environment or {}, flags=flags or {})


def test_defaults() -> None:
    settings = load()
    assert settings == Settings.default()
    assert settings.server.port == 8420
    assert settings.server.host == "127.0.0.1"
    assert settings.server.default_thinking_budget_tokens is None
    assert settings.engine.parallel == 16
    assert set(settings.sources.values()) == {"default"}
    assert set(settings.sources) == set(declarations())


def test_every_default_is_a_value_it_would_accept() -> None:
    for declaration in declarations().values():
        if declaration.default is None:
            assert declaration.optional
        else:
            assert declaration.accept(declaration.default) == declaration.default


def test_flag_beats_environment_beats_file_beats_default() -> None:
    file = "[server]\nport = 1\nhost = 'file'\nlog_level = 'error'\n"
    environment = {"KILN_SERVER_PORT": "2", "KILN_SERVER_HOST": "environment"}
    settings = load(file, environment, {"server.port": "3", "server.host": None})
    server = settings.server
    assert (server.port, server.host, server.log_level) == (3, "environment", "error")
    assert server.max_body_bytes == 8_388_608
    names = ("port", "host", "log_level", "max_body_bytes")
    sources = [settings.sources[f"server.{name}"] for name in names]
    assert sources == ["flag", "environment", "file", "default"]


def test_the_file_is_the_given_one_else_of_the_variable_else_here(tmp_path: Path) -> None:
    for name, port in (("flag.toml", 1), ("variable.toml", 2), ("kiln.toml", 3)):
        (tmp_path / name).write_text(f"[server]\nport = {port}\n")
    environment = {"KILN_CONFIG": "variable.toml"}
    given = load_settings(config_path=Path("flag.toml"), environment=environment, flags={})
    named = load_settings(config_path=None, environment=environment, flags={})
    here = load_settings(config_path=None, environment={}, flags={})
    assert [s.server.port for s in (given, named, here)] == [1, 2, 3]


@pytest.mark.parametrize("text", ["unlimited", "Unlimited", "UNLIMITED", "uNlImItEd"])
@pytest.mark.parametrize("dimension", ["tokens", "ms"])
def test_unlimited_in_any_letter_case_from_every_source(text: str, dimension: str) -> None:
    key = f"default_thinking_budget_{dimension}"
    variable = f"KILN_SERVER_{key.upper()}"
    limited = f"[server]\n{key} = 5\n"
    cases = [
        ("file", load(f"[server]\n{key} = '{text}'\n")),
        ("environment", load(limited, {variable: text})),
        ("flag", load(limited, {variable: "7"}, {f"server.{key}": text})),
    ]
    for source, settings in cases:
        assert settings.get(f"server.{key}") is None
        assert settings.sources[f"server.{key}"] == source


def test_a_budget_of_zero_is_a_limit() -> None:
    assert (
        load(environment={"KILN_SERVER_DEFAULT_THINKING_BUDGET_MS": "0"}).server.default_thinking_budget_ms
        == 0
    )


def test_numbers_and_booleans_are_read() -> None:
    settings = load(
        "[sampling]\ntemperature = 1\ntop_p = 0.5\npresence_penalty = -2\n"
        "[server]\ndefault_thinking_enabled = false",
        {"KILN_SAMPLING_FREQUENCY_PENALTY": "-1.5", "KILN_SERVER_INCLUDE_PERFORMANCE": "True"},
    )
    assert settings.sampling.temperature == 1.0
    assert isinstance(settings.sampling.temperature, float)
    assert (settings.sampling.top_p, settings.sampling.presence_penalty) == (0.5, -2.0)
    assert settings.sampling.frequency_penalty == -1.5
    assert settings.server.default_thinking_enabled is False
    assert settings.server.include_performance is True


# A file, and what the message must name besides it.
BAD_FILES = [
    ("[server]\nport = 65536", ["server.port", "65536", "from 0 to 65535"]),
    ("[server]\nport = -1", ["server.port", "-1", "from 0 to 65535"]),
    ("[server]\nport = true", ["server.port", "true", "whole number"]),
    ("[server]\nport = 8420.0", ["server.port", "8420.0", "whole number"]),
    ("[server]\nport = '8420'", ["server.port", '"8420"', "whole number"]),
    ("[server]\nport = [1]", ["server.port", "[1]"]),
    ("[server]\nport = 1979-05-27", ["server.port", "1979"]),
    ("[server]\nhost = ''", ["server.host", '""', "not empty"]),
    ("[server]\nhost = '  '", ["server.host", "not empty"]),
    ("[server]\nhost = 5", ["server.host", "5", "text"]),
    ("[server]\ninclude_performance = 1", ["server.include_performance", "true or false"]),
    ("[server]\ninclude_performance = 'true'", ["server.include_performance", "true or false"]),
    ("[server]\nlog_level = 'verbose'", ["server.log_level", "verbose", "debug, info, warning, error"]),
    ('[server]\nserved_model_id = "a\\nb"', ["server.served_model_id", "control characters"]),
    (f"[server]\nserved_model_id = '{'x' * 257}'", ["server.served_model_id", "256"]),
    ("[server]\ndefault_thinking_budget_tokens = -1", ["default_thinking_budget_tokens", "-1", "unlimited"]),
    ("[server]\ndefault_thinking_budget_ms = 'none'", ["default_thinking_budget_ms", "none", "unlimited"]),
    ("[server]\ndefault_thinking_budget_ms = 1.5", ["default_thinking_budget_ms", "1.5", "unlimited"]),
    ("[server]\nshutdown_grace_s = nan", ["server.shutdown_grace_s", "NaN", "0 or more"]),
    ("[server]\nshutdown_grace_s = inf", ["server.shutdown_grace_s", "Infinity", "0 or more"]),
    ("[server]\nshutdown_grace_s = true", ["server.shutdown_grace_s", "true"]),
    (f"[server]\nmax_body_bytes = {2**63}", ["server.max_body_bytes"]),
    ("[server]\nport = 1\nprot = 2", ["server.prot", "did you mean port"]),
    ("[servr]\nport = 1", ["[servr]", "did you mean server"]),
    ("[unheard]\nx = 1", ["[unheard]", "the sections are server, model, engine"]),
    ("port = 1", ["[port]"]),
    ("server = 1", ["server", "a section"]),
    ("[[server]]\nport = 1", ["server", "a section"]),
    ("[engine]\nparallel = 0", ["engine.parallel", "from 1 to 128"]),
    ("[engine]\nrequest_timeout_s = 0", ["engine.request_timeout_s", "above 0"]),
    ("[sampling]\ntop_p = 1.01", ["sampling.top_p", "from 0 to 1"]),
    ("[sampling]\nrepetition_penalty = 0.0", ["sampling.repetition_penalty", "above 0"]),
    ("[model]\nreasoning_open = '<a>'", ["model.reasoning_open", "model.reasoning_close", "<a>"]),
    ("[model]\nseed_open_tag = 'sometimes'", ["model.seed_open_tag", "auto, always, never"]),
    ("[tools]\nallow = 'web_search'", ["tools.allow", "a list of texts"]),
    ("[tools]\nallow = ['']", ["tools.allow", "a list of texts"]),
    ("[tools]\ndeny = [1]", ["tools.deny", "a list of texts"]),
    ("[tools]\nallow = ['category:web']", ["tools.allow", "category:web", "category:network"]),
    ("[tools]\nsearch_provider = 'searxng'", ["tools.searxng_url", "tools.search_provider", "searxng"]),
    ("[tools]\nsearxng_url = 'http://x'", ["tools.searxng_url", "tools.search_provider", "http://x"]),
    (
        "[tools]\nsearch_provider = 'searxng'\nsearxng_url = 'file:///etc'",
        ["tools.searxng_url", "http or https", "file:///etc"],
    ),
    ("mcp = 1", ["mcp", "[mcp.<name>]"]),
    ("[mcp]\nfiles = 1", ["mcp.files", "[mcp.files]"]),
    ("[[mcp.files]]\ncommand = 'x'", ["mcp.files", "[mcp.files]"]),
    ("[mcp.a__b]\ncommand = 'x'", ["[mcp.a__b]", "letters, digits and dashes"]),
    (f"[mcp.{'a' * 33}]\ncommand = 'x'", ["at most 32"]),
    ("[mcp.files]\ncomand = 'x'", ["mcp.files.comand", "did you mean command"]),
    ("[mcp.files]\ncommand = 1", ["mcp.files.command", "a text"]),
    ("[mcp.files]\nargs = ['x']", ["[mcp.files]", "either command or url"]),
    ("[mcp.files]\ncommand = 'x'\nurl = 'http://x'", ["[mcp.files]", "either command or url"]),
    ("[mcp.files]\ncommand = 'x'\nheaders = {}", ["[mcp.files]", "headers goes with url"]),
    ("[mcp.files]\nurl = 'http://x'\nargs = ['x']", ["[mcp.files]", "go with command"]),
    ("[mcp.files]\nurl = 'x'", ["[mcp.files]", "http or https"]),
    ("[mcp.files]\ncommand = 'x'\nenv = ['A=b']", ["mcp.files.env", "a table of texts"]),
    ("[mcp.files]\ncommand = 'x'\nenv = {A = 1}", ["mcp.files.env", "a table of texts"]),
    ("[server]\nport = ", ["not valid TOML", "line 2"]),
    ("[server]\nport = 1\nport = 2", ["not valid TOML", "line 3"]),
    (f"[server]\nport = {'9' * 5000}", ["not valid TOML"]),
    ("[server]\nport = 8_420\n[server]\n", ["not valid TOML", "line 3"]),
]


@pytest.mark.parametrize(("file", "named"), BAD_FILES)
def test_a_bad_file_stops(file: str, named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(file)
    for words in ["given.toml", *named]:
        assert words in caught.value.message


BAD_ENVIRONMENT = (
    [
        ("KILN_SERVER_PORT", text)
        for text in (
            "",
            " ",
            "x",
            "1_000",
            "+5",
            "-5",
            " 5",
            "5 ",
            "5\n",
            "0x10",
            "1e3",
            "5.0",
            "٣",
            "9" * 5000,
            "true",
        )
    ]
    + [
        ("KILN_SERVER_DEFAULT_THINKING_BUDGET_TOKENS", text)
        for text in ("", "null", "None", "-1", "+1", "1_0", "1.0", "unlimited ", "infinite", str(2**63))
    ]
    + [
        ("KILN_SAMPLING_TEMPERATURE", text)
        for text in ("", "nan", "inf", "-0.1", "1_0", ".5", "1e999", "unlimited")
    ]
    + [("KILN_SERVER_INCLUDE_PERFORMANCE", text) for text in ("", "1", "yes", " true")]
    + [
        ("KILN_SERVER_LOG_LEVEL", "INFO"),
        ("KILN_MODEL_PATH", ""),
        ("KILN_CONFIG", ""),
        ("KILN_SERVER_PROT", "1"),
        ("KILN_ENGINE_", "1"),
        ("KILN_MODEL", "x.gguf"),
        ("KILN_TOOLS_ALLOW", "web_search,,x"),
        ("KILN_MCP_FILES_COMMAND", "x"),
    ]
)


@pytest.mark.parametrize(("variable", "text"), BAD_ENVIRONMENT)
def test_a_bad_variable_stops(variable: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(environment={variable: text})
    assert variable in caught.value.message
    assert "environment" in caught.value.message


def test_the_message_says_key_source_value_and_what_is_allowed() -> None:
    with pytest.raises(ConfigError) as caught:
        load(environment={"KILN_SERVER_PORT": "1_000"})
    assert caught.value.message == (
        'KILN_SERVER_PORT in the environment is "1_000": it must be a whole number from 0 to 65535'
    )
    with pytest.raises(ConfigError) as caught:
        load(flags={"engine.ctx_size": "x"})
    assert "engine.ctx_size" in caught.value.message
    assert "--ctx-size" in caught.value.message


def test_other_variables_of_the_prefix_are_left_alone() -> None:
    assert load(environment={"KILN_HOME": "x", "KILNSERVER": "y", "SERVER_PORT": "z"}) == Settings.default()


def test_files_that_cannot_be_read_stop(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b"[server]\nhost = '\xe9'\n")
    for name, words in (("absent.toml", "No such file"), (".", "directory"), ("latin.toml", "not UTF-8")):
        with pytest.raises(ConfigError, match=words):
            load_settings(config_path=Path(name), environment={}, flags={})
    (tmp_path / "kiln.toml").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="kiln.toml cannot be read"):
        load_settings(config_path=None, environment={}, flags={})


def test_a_value_is_checked_even_where_a_weightier_source_wins() -> None:
    with pytest.raises(ConfigError, match="server.port"):
        load("[server]\nport = 'x'", flags={"server.port": "1"})


def test_a_reasoning_tag_pair_may_come_from_two_sources() -> None:
    settings = load("[model]\nreasoning_open = '<a>'", {"KILN_MODEL_REASONING_CLOSE": "</a>"})
    assert (settings.model.reasoning_open, settings.model.reasoning_close) == ("<a>", "</a>")


@given(st.sampled_from(sorted(declarations())), st.text())
def test_any_text_is_either_read_or_refused_with_the_key(name: str, text: str) -> None:
    try:
        settings = load_settings(config_path=None, environment={}, flags={name: text})
    except ConfigError as error:
        assert name in error.message
    else:
        assert settings.sources[name] == "flag"


def test_lists_are_read() -> None:
    file = "[tools]\nallow = ['web_*', 'category:pure']\n"
    assert load(file).tools.allow == ("web_*", "category:pure")
    assert load(file, {"KILN_TOOLS_ALLOW": "a, b"}).tools.allow == ("a", "b")
    assert load(file, {"KILN_TOOLS_ALLOW": ""}).tools.allow == ()
    assert json.loads(json.dumps(settings_as_json(load(file))))["tools"]["allow"] == {
        "value": ["web_*", "category:pure"],
        "source": "file",
    }


NAMED_TABLES = """
[mcp.files]
command = "serve-files"
args = ["/srv"]
env = { TOKEN = "hush", EMPTY = "" }

[mcp.far-away]
url = "https://example.org/mcp"
headers = { Authorization = "Bearer hush" }
timeout_s = 3
"""


def test_named_tables_are_read() -> None:
    settings = load(NAMED_TABLES)
    assert list(settings.mcp) == ["files", "far-away"]
    files, far = settings.mcp["files"], settings.mcp["far-away"]
    assert (files.command, files.args, files.url) == ("serve-files", ("/srv",), None)
    assert dict(files.env or {}) == {"TOKEN": "hush", "EMPTY": ""}
    assert (far.url, dict(far.headers or {}), far.timeout_s) == (
        "https://example.org/mcp",
        {"Authorization": "Bearer hush"},
        3.0,
    )
    assert load().mcp == {}


def test_named_tables_are_shown_without_their_secrets(empty_directory: Path) -> None:
    (empty_directory / "kiln.toml").write_text(NAMED_TABLES)
    plain = CliRunner().invoke(app, ["config"])
    assert "mcp.files.command = serve-files (file)" in plain.stdout.splitlines()
    assert "mcp.files.env = set, not shown (file)" in plain.stdout.splitlines()
    shown = CliRunner().invoke(app, ["config", "--json"])
    tables = json.loads(shown.stdout)["mcp"]
    assert tables["far-away"] == {
        "url": "https://example.org/mcp",
        "headers": "set, not shown",
        "timeout_s": 3.0,
    }
    assert "hush" not in plain.stdout + shown.stdout


def test_a_bad_secret_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        load("[mcp.files]\ncommand = 'x'\nenv = {TOKEN = ['hush']}")
    assert "hush" not in caught.value.message


def test_settings_as_json_has_every_key_in_sections() -> None:
    shown = settings_as_json(load(environment={"KILN_SERVER_PORT": "9"}))
    assert list(shown) == list(SECTIONS)
    assert shown["server"]["port"] == {"value": 9, "source": "environment"}
    assert shown["server"]["default_thinking_budget_tokens"] == {"value": None, "source": "default"}
    assert json.loads(json.dumps(shown)) == shown


def test_config_json_command() -> None:
    result = CliRunner().invoke(
        app,
        [
            "config",
            "--json",
            "--port",
            "0",
            "--default-thinking-budget-tokens",
            "UNLIMITED",
            "--model",
            "m.gguf",
        ],
        env={"KILN_SERVER_DEFAULT_THINKING_BUDGET_MS": "300"},
    )
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert shown["server"]["port"] == {"value": 0, "source": "flag"}
    assert shown["server"]["default_thinking_budget_tokens"] == {"value": None, "source": "flag"}
    assert shown["server"]["default_thinking_budget_ms"] == {"value": 300, "source": "environment"}
    assert shown["model"]["path"] == {"value": "m.gguf", "source": "flag"}


def test_config_command_in_lines(empty_directory: Path) -> None:
    (empty_directory / "kiln.toml").write_text("[engine]\nparallel = 4\n")
    result = CliRunner().invoke(app, ["config"])
    lines = result.stdout.splitlines()
    assert lines[0] == "settings file: kiln.toml"
    assert "engine.parallel = 4 (file)" in lines
    assert "server.default_thinking_budget_ms = unlimited (default)" in lines
    assert "server.include_performance = false (default)" in lines
    assert len(lines) == 1 + len(declarations())


@pytest.mark.parametrize("command", ["config", "serve", "chat"])
def test_a_malformed_value_stops_every_command_without_a_traceback(command: str) -> None:
    result = CliRunner().invoke(app, [command], env={"KILN_SERVER_PORT": "many"})
    assert result.exit_code == 2
    assert 'kiln: KILN_SERVER_PORT in the environment is "many"' in result.stderr
    assert "Traceback" not in result.output
