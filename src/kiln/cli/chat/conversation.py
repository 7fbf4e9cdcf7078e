"""The conversation of `kiln chat`: its history, its commands, and one exchange after the other."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from kiln.cli.chat.exchange import ChatError, Exchange, error_text, read_events, summarize
from kiln.cli.chat.interrupts import Interrupts
from kiln.cli.chat.view import View
from kiln.cli.common import complain
from kiln.cli.configuration import parse_text
from kiln.core.settings import BadValue, declarations
from kiln.core.wording import counted

CONNECT_TIMEOUT_S = 5.0
HELP = "/quit ends, /clear forgets the conversation, /budget N|unlimited limits the thinking tokens"


@dataclass
class Chat:
    """A conversation and how its requests are to be made. `budgets` holds only what was stated."""

    url: str
    model: str | None = None
    system: str | None = None
    budgets: dict[str, int | None] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    thinking: bool = True
    adapter: str | None = None
    history: list[dict[str, str]] = field(default_factory=list)
    trust_env: bool = True
    api_key: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}

    def body(self) -> dict[str, Any]:
        """The request for the next answer."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        body: dict[str, Any] = {
            "messages": system + self.history,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.budgets,
            **self.sampling,
        }
        if self.model is not None:
            body["model"] = self.model
        if self.adapter is not None:
            body["adapter"] = self.adapter
        if not self.thinking:
            body["chat_template_kwargs"] = {"enable_thinking": False}
        return body


def run(chat: Chat, prompt: str | None, view: View) -> int:
    """Ask once, or converse until the user ends it. Gives the exit status."""
    with Interrupts() as interrupts:
        if prompt is None:
            return converse(chat, view, interrupts)
        exchange = ask(chat, encodable(prompt), view, interrupts)
        if exchange is None:
            return 1
        return 130 if exchange.cancelled else 0


def converse(chat: Chat, view: View, interrupts: Interrupts) -> int:
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        view.note(HELP)
    warned = False
    while True:
        try:
            line = interrupts.read_line("> " if interactive else "")
        except EOFError:
            return 0
        except KeyboardInterrupt:
            if interactive:
                print()  # after the terminal's own ^C
            if warned:
                return 130
            warned = True
            view.note("Ctrl-C again, or /quit, ends the chat")
            continue
        warned = False
        line = encodable(line.strip())
        if line == "/quit":
            return 0
        if line.startswith("/"):
            view.note(command(chat, line))
        elif line:
            ask(chat, line, view, interrupts)


def command(chat: Chat, line: str) -> str:
    """Carry out a line such as `/budget 16`; gives what to tell the user."""
    name, _, argument = line.partition(" ")
    argument = argument.strip()
    if name == "/clear" and not argument:
        chat.history.clear()
        return "the conversation is forgotten"
    if name == "/budget" and argument:
        declaration = declarations()["server.default_thinking_budget_tokens"]
        try:
            chat.budgets["thinking_budget_tokens"] = parse_text(declaration, argument)
        except BadValue as allowed:
            return f"the budget must be {allowed}"
    if name == "/budget":
        if "thinking_budget_tokens" not in chat.budgets:
            return "thinking budget: the server's default"
        limit = chat.budgets["thinking_budget_tokens"]
        return "thinking budget: " + ("unlimited" if limit is None else counted(limit, "token"))
    return HELP


def ask(chat: Chat, text: str, view: View, interrupts: Interrupts) -> Exchange | None:
    """One exchange. The history keeps it if anything was answered. None if it failed."""
    chat.history.append({"role": "user", "content": text})
    exchange = Exchange(time.monotonic())
    view.begin(exchange)
    try:
        asyncio.run(_stream(chat, exchange, view, interrupts))
    except (ChatError, httpx.HTTPError, httpx.InvalidURL) as error:
        view.end()
        chat.history.pop()
        _explain(error, chat.url)
        return None
    view.end()
    if exchange.answer:
        chat.history.append({"role": "assistant", "content": exchange.answer})
    else:
        chat.history.pop()
    if summary := summarize(exchange):
        view.note(summary)
    return exchange


def _explain(error: Exception, url: str) -> None:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        complain(f"no server answers at {url}", "Start one with `kiln serve`, or leave --url out.")
    elif isinstance(error, ChatError):
        complain(str(error))
    else:
        complain(f"the connection to {url} failed: {error or type(error).__name__}")


async def _stream(chat: Chat, exchange: Exchange, view: View, interrupts: Interrupts) -> None:
    """Receive one answer. A Ctrl-C is handled between two events of the loop, never inside one."""
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    skips: set[asyncio.Task[None]] = set()
    async with httpx.AsyncClient(timeout=timeout, trust_env=chat.trust_env, headers=chat.headers) as client:

        def skip_if_due() -> None:
            request_id = exchange.skip_due()
            if request_id is not None:
                skips.add(asyncio.create_task(_skip_thinking(client, chat.url, request_id, view)))

        def on_interrupt() -> None:
            if exchange.interrupt():
                receiving.cancel()
            else:
                skip_if_due()

        async def receive() -> None:
            async with client.stream("POST", f"{chat.url}/v1/chat/completions", json=chat.body()) as response:
                await _check(response)
                async for event in read_events(response.aiter_bytes()):
                    for piece in exchange.accept(event, time.monotonic()):
                        view.show(piece)
                    skip_if_due()

        receiving = asyncio.create_task(receive())
        with interrupts.sent_to(asyncio.get_running_loop(), on_interrupt):
            try:
                await receiving
            except asyncio.CancelledError:
                if not exchange.cancelled:
                    raise
            finally:
                for task in skips:
                    task.cancel()
                await asyncio.gather(*skips, return_exceptions=True)


async def _check(response: httpx.Response) -> None:
    """Raise ChatError, in the server's own words, unless a stream comes."""
    if response.status_code != 200:
        await response.aread()
        try:
            text = error_text(response.json())
        except ValueError:
            text = response.text[:200].strip()
        raise ChatError(f"the server answered {response.status_code}: {text}")
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        raise ChatError("the server did not answer with an event stream; is it kiln?")


async def _skip_thinking(client: httpx.AsyncClient, url: str, request_id: str, view: View) -> None:
    try:
        answer = await client.post(
            f"{url}/lmkit/v1/chat/skip-thinking", json={"request_id": request_id}, timeout=CONNECT_TIMEOUT_S
        )
    except httpx.HTTPError as error:
        view.note(f"the thinking could not be cut short: {error or type(error).__name__}")
        return
    if answer.status_code != 202:
        view.note(f"the server did not cut the thinking short ({answer.status_code}); Ctrl-C stops it all")


def encodable(text: str) -> str:
    """The text as JSON can carry it: a terminal may hand over bytes that are no UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")
