"""Abuse that once took the server down, or took it away from everybody else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kiln.cli.embedded import embedded_server
from kiln.core.settings import Settings
from servers.raw import connected


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with embedded_server(Settings.default()) as base:
        yield base


def ask(url: str, content: str, **fields: object) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


def test_every_private_character_there_is(url: str) -> None:
    # Two of these occupied both preparing threads for ever: they looked for a mark that was not taken.
    for plane in (0xF0000, 0x100000):
        response = ask(url, "".join(map(chr, range(plane, plane + 0xFFFE))))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages"
    assert ask(url, "1+1=?").status_code == 200


def test_prompts_that_cannot_fit_are_refused_before_they_cost_anything(url: str) -> None:
    messages = [{"role": "user", "content": "x"}] * 20_000
    started = time.process_time()
    for body in ({"messages": messages}, {"messages": [{"role": "user", "content": "<" * 4_000_000}]}):
        response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert response.json()["error"]["code"] == "context_length_exceeded"
    # Tokenizing these took minutes of processor time; the server runs in this process.
    assert time.process_time() - started < 30


def test_deep_recursion_in_a_tokenizer_has_the_stack_for_it(url: str) -> None:
    # The threads that tokenize were started with a large stack: a million of these characters fit.
    assert ask(url, "a" * 30_000).json()["error"]["code"] == "context_length_exceeded"


def test_a_content_length_beyond_numbers(url: str) -> None:
    with connected(url) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: " + b"0" * 5000 + b"2\r\n\r\n{}"
        )
        assert b" 400 " in connection.recv(4096).partition(b"\r\n")[0] + b" "


def serve(folder: Path, *flags: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kiln", "serve", "--port", "0", *flags],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_engine_imports_nothing_from_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit('imported from the working directory')")
    command = [sys.executable, "-P", "-m", "kiln", "serve", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert any("serves" in line for line in server.stdout)
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


def test_an_engine_that_cannot_start_is_one_plain_line(tmp_path: Path) -> None:
    # The vocabulary loads; the context, in the child, does not fit into the address space.
    with serve(tmp_path, KILN_ENGINE_KV_SIZE=str(2**31 - 1)) as server:
        _, errors = server.communicate(timeout=120)
    assert server.returncode == 2
    assert "Traceback" not in errors
    assert any(line.startswith("kiln: ") for line in errors.splitlines())


def test_a_model_id_that_is_not_text(tmp_path: Path) -> None:
    with serve(tmp_path, "--served-model-id", "a\udcffb") as server:
        _, errors = server.communicate(timeout=60)
    assert server.returncode == 2
    assert "served_model_id" in errors
