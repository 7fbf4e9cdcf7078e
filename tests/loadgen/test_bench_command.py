"""`kiln bench` from its flags to its table and files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kiln.cli.bench import bench, parse_body, parse_loads
from kiln.cli.embedded import embedded_server, serve_app
from kiln.core.errors import ConfigError
from kiln.core.settings import Settings
from kiln.loadgen.load import ClosedLoop, Poisson

from .scripted import STREAM_HEAD, Scripted, chunked, event, raw_server

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(bench)

GENERAL = ("--help", "--install-completion", "--show-completion")
DOCUMENT = Path(__file__).parents[2] / "docs" / "bench.md"
SMALL = ("--requests", "4", "--output-tokens", "4", "--prompt-tokens", "12")


def invoke(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, arguments, catch_exceptions=False)


def test_one_server_at_two_levels(url: str, scripted: Scripted, tmp_path: Path) -> None:
    files = ("--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "p.svg"))
    budget = ("--body", '{"thinking_budget_tokens": 2}', "--slo-ttft-ms", "60000")
    result = invoke(url, *SMALL, "--concurrency", "1,2", "--temperature", "0", *budget, *files)
    assert result.exit_code == 0
    for words in (
        f"{url}/v1, 1 stream",
        f"{url}/v1, 2 streams",
        "4 of 4 succeeded",
        "first answer token",
        "goodput     100.0%",
        "applied to 4 of 4; 4 by tokens",
        "of one core",
    ):
        assert words in result.output
    content = json.loads((tmp_path / "r.json").read_text())
    assert [report["load"] for report in content["reports"]] == ["1 stream", "2 streams"]
    assert [len(report["per_request"]) for report in content["reports"]] == [4, 4]
    assert content["reports"][0]["budgets"]["triggered"] == {"tokens": 4}
    assert (tmp_path / "p.svg").read_text().startswith("<svg")
    # Two to learn the length of a word, then for each level a warm-up and four measured.
    measured = [body for body in scripted.bodies if body["max_tokens"] == 4]
    assert (len(scripted.bodies), len(measured)) == (12, 10)
    assert len({body["messages"][0]["content"] for body in scripted.bodies}) == 12
    assert all(body["thinking_budget_tokens"] == 2 and body["temperature"] == 0 for body in measured)
    assert all(len(body["messages"][0]["content"].split()) == 6 for body in measured)


def test_two_servers_get_the_same_prompts_in_turn(url: str, scripted: Scripted, tmp_path: Path) -> None:
    other = Scripted(pause_s=0.002)
    with serve_app(other.app) as against:
        result = invoke(
            url, "--against", against, "--rounds", "3", *SMALL, "--json", str(tmp_path / "c.json")
        )
    assert result.exit_code == 0
    assert "3 rounds in turn" in result.output
    content = json.loads((tmp_path / "c.json").read_text())
    (comparison,) = content["comparisons"]
    ratios = {row["metric"]: row["ratio"] for row in comparison["ratios"]}
    assert ratios["TTFT p50"]["count"] == 3
    assert ratios["TTFT p50"]["low"] <= ratios["TTFT p50"]["median"] <= ratios["TTFT p50"]["high"]
    a, b = (
        [body["messages"] for body in side.bodies if body["max_tokens"] == 4] for side in (scripted, other)
    )
    assert a == b and len(a) == 1 + 3 * 4


def test_one_server_twice_is_remarked_upon(url: str) -> None:
    result = invoke(url, "--against", url, "--rounds", "1", *SMALL)
    assert "both are one server" in result.output


def test_an_open_loop_over_completions_without_warm_up(url: str, scripted: Scripted) -> None:
    result = invoke(url, *SMALL, "--rate", "200", "--endpoint", "completions", "--warmup", "0")
    assert result.exit_code == 0
    assert "200 requests/s" in result.output
    assert all("prompt" in body for body in scripted.bodies)


def test_a_dataset_and_a_shared_prefix(url: str, scripted: Scripted, tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(
        '{"prompt": "first", "max_tokens": 3}\n{"messages": [{"role": "user", "content": "b"}]}\n'
    )
    assert invoke(url, *SMALL[:4], "--dataset", str(path)).exit_code == 0
    asked = [(body["messages"][0]["content"], body["max_tokens"]) for body in scripted.bodies]
    assert asked == [("first", 3)] + [("first", 3), ("b", 4)] * 2
    scripted.bodies.clear()
    assert invoke(url, *SMALL, "--shared-prefix", "40").exit_code == 0
    starts = {tuple(b["messages"][0]["content"].split()[:20]) for b in scripted.bodies[-4:]}
    assert len(starts) == 1


def test_failed_requests_are_shown_beside_the_others(url: str, scripted: Scripted) -> None:
    scripted.fail_every = 4
    result = invoke(url, *SMALL, "--warmup", "0")
    assert result.exit_code == 0
    assert "1 http_503" in result.output and "too busy" in result.output


def refused(*arguments: str) -> list[str]:
    """The lines of a command that ends with status 2."""
    result = invoke(*arguments)
    assert result.exit_code == 2
    return str(result.output).splitlines()


def test_no_server(tmp_path: Path) -> None:
    lines = refused("http://127.0.0.1:9")
    assert lines[0].startswith("kiln: no server answers at http://127.0.0.1:9/v1")
    assert lines[1].startswith("hint: ") and len(lines) == 2


@pytest.mark.parametrize("warm_up", ["0", "1"])
def test_a_route_that_is_not_there(url: str, warm_up: str) -> None:
    lines = refused(url + "/api", "--warmup", warm_up, *SMALL)
    assert lines[0] == f"kiln: {url}/api/chat/completions answered 404: Not Found"
    assert "base path" in lines[1] and len(lines) == 2


def test_a_server_of_another_kind() -> None:
    page = b"<html>" * 3
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 18\r\n\r\n"
    with raw_server([head + page, None, head + page, None, head + page, None, head + page]) as url:
        lines = refused(url, *SMALL)
    assert "text/html and not an event stream" in lines[0]


def test_a_server_that_sends_no_json() -> None:
    with raw_server([STREAM_HEAD + chunked(b"data: oops\n\n")]) as url:
        assert "cannot be read" in refused(url, "--model", "m", *SMALL)[0]


def test_a_server_that_cuts_every_stream() -> None:
    with raw_server([STREAM_HEAD + chunked(event({"content": "x"}))]) as url:
        assert "in the middle of the answer" in refused(url, "--model", "m", *SMALL)[0]


def test_a_server_that_never_answers() -> None:
    with raw_server([30.0]) as url:
        lines = refused(url, "--model", "m", "--timeout", "0.2", *SMALL)
    assert "within 0.2 s" in lines[0] and "--timeout" in lines[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--concurrency", "1,x"), "--concurrency"),
        (("--concurrency", "0"), "--concurrency"),
        (("--rate", "0"), "--rate"),
        (("--rate", "nan"), "--rate"),
        (("--rate", "2", "--concurrency", "2"), "exclude"),
        (("--duration", "-1"), "--duration"),
        (("--prompt-tokens", "many"), "--prompt-tokens"),
        (("--body", "{"), "--body"),
        (("--body", "[]"), "--body"),
        (("--dataset", "/no/such.jsonl"), "--dataset"),
        (("--plot", "p.pdf"), "--plot"),
        (
            ("--dataset", "/no/such.jsonl"),
            "--dataset /no/such.jsonl cannot be read: No such file or directory",
        ),
        (("--dataset", "/"), "--dataset / cannot be read: Is a directory"),
        (
            ("--json", "/no/such/r.json"),
            "--json /no/such/r.json cannot be written: there is no folder /no/such",
        ),
        (("--json", "/"), "--json / cannot be written: it is a folder"),
        (("--rounds", "3"), "--rounds is for a comparison"),
        (("--against-model", "m"), "--against-model is for a comparison"),
        (("--against-api-key", "k"), "--against-api-key is for a comparison"),
        (("--dataset", "/x", "--prompt-tokens", "5"), "--prompt-tokens and --dataset exclude each other"),
        (("--dataset", "/x", "--shared-prefix", "5"), "--shared-prefix and --dataset exclude each other"),
        (("--slo-ttft-ms", "0"), "--slo-ttft-ms"),
        (("--against", "ftp://nowhere"), "no address"),
    ],
)
def test_wrong_flags_are_named_before_any_load(arguments: tuple[str, ...], words: str) -> None:
    line = refused("http://127.0.0.1:9", *arguments)[0]
    assert words in line and "Errno" not in line


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is write-protected for the superuser")
def test_a_protected_folder_is_named_before_any_load(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    line = refused("http://127.0.0.1:9", "--json", str(tmp_path / "r.json"))[0]
    tmp_path.chmod(0o700)
    assert line.endswith(f"cannot be written: {tmp_path} is write-protected")


def test_an_address_needs_no_scheme(url: str) -> None:
    result = invoke(url.removeprefix("http://"), *SMALL)
    assert result.exit_code == 0 and f"{url}/v1, 1 stream" in result.output
    assert refused("localhost:9")[0].startswith("kiln: no server answers at http://localhost:9/v1")


def test_text_completions_of_kiln_are_under_another_path() -> None:
    """Its `/v1/completions` only scores prompts; the hint names the path that `kiln bench` then loads."""
    flags = (*SMALL, "--endpoint", "completions", "--ignore-eos")
    with embedded_server(Settings.default()) as url:
        lines = refused(url, *flags)
        hint = re.search(r"For kiln give (\S+):", lines[1])
        assert hint is not None and hint[1] == f"{url}/v1/openai"
        result = invoke(hint[1], *flags)
    assert result.exit_code == 0
    assert "4 of 4 succeeded" in result.output and "output      4.0 tokens" in result.output
    assert "budgets" not in result.output


def test_a_dataset_of_messages_does_not_go_with_completions(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "b"}]}\n')
    lines = refused("http://127.0.0.1:9", "--dataset", str(path), "--endpoint", "completions")
    assert "--endpoint completions" in lines[0]


def test_loads_and_bodies_are_read() -> None:
    assert parse_loads("1,4", None, None) == (ClosedLoop(1), ClosedLoop(4))
    assert parse_loads("1", 2.5, None) == (Poisson(2.5),)
    assert parse_body('{"a": null}') == {"a": None}
    with pytest.raises(ConfigError):
        parse_body("5")


def test_ctrl_c_shows_what_was_measured_so_far(url: str, scripted: Scripted) -> None:
    code = "import typer; from kiln.cli.bench import bench; typer.run(bench)"
    command = [sys.executable, "-c", code, url, "--requests", "100000", "--output-tokens", "4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while len(scripted.bodies) < 8 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == ""
    assert "interrupted" in output
    assert re.search(r"requests    [1-9]\d* of ", output)


def test_the_document_lists_every_flag() -> None:
    rows = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| `--")]
    documented = {}
    for row in rows:
        name, meaning = (cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1])
        documented[name.strip("`").replace("\\|", "|")] = meaning
    expected = {}
    command: Any = typer.main.get_command(app)
    for parameter in command.params:
        if parameter.param_type_name == "option" and parameter.opts[0] not in GENERAL:
            name = f"{parameter.opts[0]} {parameter.metavar or ''}".strip()
            expected[name] = parameter.help.replace("|", "\\|")
    assert documented == expected
