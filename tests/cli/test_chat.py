"""`kiln chat` as a process of its own, against a scripted server on a real socket."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
from rich.console import Console

from kiln.cli.chat.conversation import Chat, command, run
from kiln.cli.chat.exchange import Exchange, Phase, Piece
from kiln.cli.chat.view import PlainView, TerminalView, printable
from kiln.cli.common import base_url
from kiln.cli.embedded import serve_app
from kiln.core.errors import ConfigError

from .scripted import REQUEST_ID, Scripted

SOURCE = Path(__file__).parents[2] / "src"
WITHIN_S = 20.0


@pytest.fixture
def url() -> Iterator[str]:
    with serve_app(Scripted().app) as address:
        yield address


def state(url: str) -> Any:
    return httpx.get(f"{url}/state", trust_env=False).json()


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.02)


class Process:
    """A chat with pipes for a terminal; what it writes is gathered while it runs."""

    def __init__(self, url: str, *arguments: str, stdin: str | None = None) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KILN_")}
        environment |= {"PYTHONPATH": str(SOURCE), "FORCE_COLOR": "1", "NO_PROXY": "*"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kiln.cli.main", "chat", "--url", url, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self.stdin = self.process.stdin
        self._gathered: dict[str, bytes] = {"out": b"", "err": b""}
        self._readers = [
            threading.Thread(target=self._gather, args=("out", self.process.stdout)),
            threading.Thread(target=self._gather, args=("err", self.process.stderr)),
        ]
        for reader in self._readers:
            reader.start()

    def _gather(self, name: str, pipe: IO[bytes]) -> None:
        while data := os.read(pipe.fileno(), 4096):
            self._gathered[name] += data

    @property
    def out(self) -> str:
        return self._gathered["out"].decode()

    @property
    def err(self) -> str:
        return self._gathered["err"].decode()

    def say(self, line: str) -> None:
        self.stdin.write(f"{line}\n".encode())
        self.stdin.flush()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> int:
        status = self.process.wait(WITHIN_S)
        for reader in self._readers:
            reader.join(WITHIN_S)
        return status

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdin.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for reader in self._readers:
            reader.join(WITHIN_S)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


def test_one_exchange_in_plain_text(url: str) -> None:
    flags = ["--thinking-budget-tokens", "4", "--thinking-budget-ms", "Unlimited", "--temperature", "0"]
    flags += ["--max-tokens", "64", "--system", "Be brief.", "--no-thinking", "--model", "m"]
    with Process(url + "/v1/", *flags, "budget") as chat:
        assert chat.end() == 0
        assert chat.out == "four\u2028\U0001f600\n"
        assert "[thinking]\nLet me think.\n" in chat.err
        assert "thought 16 tokens in 2.5 s (closed by the token budget) · 21 completion tokens" in chat.err
        assert "\x1b" not in chat.out + chat.err
    assert state(url)["bodies"] == [
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "budget"},
            ],
            "stream": True,
            "stream_options": {"include_usage": True},
            "thinking_budget_tokens": 4,
            "thinking_budget_ms": None,
            "temperature": 0.0,
            "max_tokens": 64,
            "model": "m",
            "chat_template_kwargs": {"enable_thinking": False},
        }
    ]


def test_first_ctrl_c_cuts_the_thinking_short_and_the_answer_comes(url: str) -> None:
    with Process(url, "endless") as chat:
        eventually(lambda: " hm hm" in chat.err)
        chat.interrupt()
        assert chat.end() == 0
        assert chat.out == "four\u2028\U0001f600\n"
        assert "(cut short by you)" in chat.err
    assert state(url)["skipped"] == [{"request_id": REQUEST_ID}]


def test_second_ctrl_c_ends_the_exchange(url: str) -> None:
    with Process(url, "endless deaf") as chat:
        eventually(lambda: " hm hm" in chat.err)
        chat.interrupt()
        eventually(lambda: len(state(url)["skipped"]) == 1)
        chat.interrupt()
        assert chat.end() == 130
        assert "Traceback" not in chat.err
        assert "stopped by you" in chat.err
    eventually(lambda: state(url)["disconnects"] == 1)


def test_ctrl_c_during_the_answer_returns_to_the_prompt(url: str) -> None:
    with Process(url) as chat:
        chat.say("talk")
        eventually(lambda: " and and" in chat.out)
        chat.interrupt()
        eventually(lambda: "stopped by you" in chat.err)
        chat.say("hello")
        eventually(lambda: len(state(url)["bodies"]) == 2)
        chat.say("/quit")
        assert chat.end() == 0
    roles = [m["role"] for m in state(url)["bodies"][1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert state(url)["skipped"] == []


def test_two_ctrl_c_at_the_prompt_end_the_chat(url: str) -> None:
    with Process(url) as chat:
        chat.say("/budget")  # its reply says that the chat is at the prompt
        eventually(lambda: "server's default" in chat.err)
        time.sleep(0.1)
        chat.interrupt()
        eventually(lambda: "Ctrl-C again" in chat.err)
        time.sleep(0.1)
        chat.interrupt()
        assert chat.end() == 130
        assert "Traceback" not in chat.err


def test_a_storm_of_ctrl_c_never_ends_in_a_traceback(url: str) -> None:
    with Process(url) as chat:
        chat.say("/budget")
        eventually(lambda: "server's default" in chat.err)
        for _ in range(6):
            try:
                chat.say("endless")
            except BrokenPipeError:  # two of them met the prompt and ended the chat
                break
            for _ in range(5):
                chat.interrupt()
                time.sleep(0.007)
        try:
            chat.stdin.close()
        except BrokenPipeError:
            pass

        def ends() -> bool:
            # Lines that it has not read yet begin endless answers of their own: each needs its Ctrl-C.
            chat.interrupt()
            time.sleep(0.08)
            return chat.process.poll() is not None

        eventually(ends)
        # -2: the last one met an interpreter that was about to end.
        assert chat.end() in (0, 130, -signal.SIGINT)
        assert "Traceback" not in chat.err


def test_turns_keep_the_answers_alone(url: str) -> None:
    with Process(url) as chat:
        for line in ("one", "/budget 16", "two", "/clear", "/budget unlimited", "three", "/what"):
            chat.say(line)
        chat.stdin.close()
        assert chat.end() == 0
        assert chat.out == "four\u2028\U0001f600\n" * 3
        assert "/quit ends" in chat.err
    one, two, three = state(url)["bodies"]
    assert "thinking_budget_tokens" not in one
    assert two["thinking_budget_tokens"] == 16
    assert two["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "four\u2028\U0001f600"},
        {"role": "user", "content": "two"},
    ]
    assert three["thinking_budget_tokens"] is None
    assert three["messages"] == [{"role": "user", "content": "three"}]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("refuse", "the server answered 404: no such model (Look it up.)"),
        ("page", "did not answer with an event stream"),
        ("break", "the answer broke off"),
        ("fail", "the engine stopped (Try again.)"),
    ],
)
def test_failures_are_one_line(url: str, prompt: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat(url, trust_env=False)
    assert run(chat, prompt, PlainView(sys.stdout, sys.stderr)) == 1
    assert f"kiln: {words}" in capsys.readouterr().err.replace("kiln: the server did", "kiln: did")
    assert chat.history == []


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat("http://127.0.0.1:9", trust_env=False)
    assert run(chat, "hello", PlainView(sys.stdout, sys.stderr)) == 1
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--thinking-budget-tokens", "-1"],
        ["--thinking-budget-ms", "soon"],
        ["--temperature", "nan"],
        ["--max-tokens", "1.5"],
    ],
)
def test_a_malformed_flag_stops(arguments: list[str]) -> None:
    from typer.testing import CliRunner

    from kiln.cli.main import app

    result = CliRunner().invoke(app, ["chat", "--url", "http://127.0.0.1:9", *arguments, "hello"])
    assert result.exit_code == 2
    assert arguments[0] in result.stderr


def test_an_inert_budget_is_told(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Chat(url, trust_env=False), "plain", PlainView(sys.stdout, sys.stderr)) == 0
    assert "the budget did not apply" in capsys.readouterr().err


def test_commands_at_the_prompt() -> None:
    chat = Chat("http://x", history=[{"role": "user", "content": "x"}])
    assert "default" in command(chat, "/budget")
    assert command(chat, "/budget 1") == "thinking budget: 1 token"
    assert command(chat, "/budget UNLIMITED") == "thinking budget: unlimited"
    assert "must be" in command(chat, "/budget -1")
    assert chat.budgets == {"thinking_budget_tokens": None}
    command(chat, "/clear")
    assert chat.history == []


def test_addresses() -> None:
    assert base_url("http://a:1/v1/") == "http://a:1"
    assert base_url("https://a/b") == "https://a/b"
    assert base_url("a:1") == "http://a:1"
    for address in ("", "ftp://a"):
        with pytest.raises(ConfigError):
            base_url(address)


def test_a_model_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[31mb\x9bc\n\td\r\x7f") == "a[31mbc\n\td"


def test_the_terminal_view_dims_thinking_and_counts_it() -> None:
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=True, width=60, height=20, color_system="standard", markup=False
    )
    view = TerminalView(console)
    exchange = Exchange(time.monotonic())
    view.begin(exchange)
    for _ in range(3):
        for piece in exchange.accept(
            {"choices": [{"delta": {"reasoning_content": "hm [b] "}}]}, time.monotonic()
        ):
            view.show(piece)
    eventually(lambda: "3 tokens" in file.getvalue())
    view.show(Piece(Phase.ANSWERING, "\n\nfour"))
    view.end()
    view.note("done")
    shown = file.getvalue()
    assert "\x1b[2mhm [b] hm [b] hm [b]\x1b[0m" in shown
    assert shown.index("3 tokens") < shown.index("\nfour\n") < shown.index("done")
