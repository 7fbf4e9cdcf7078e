"""The command `kiln chat`: its flags, and a server where none is named."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated, Any

import typer

from kiln.cli.chat.conversation import Chat, encodable, run
from kiln.cli.chat.view import choose_view
from kiln.cli.common import ConfigFlag, base_url, notes, plain_errors, settings_from, with_model_file
from kiln.cli.configuration import parse_text
from kiln.core.errors import ConfigError
from kiln.core.settings import BadValue, declarations, show_value


def chat(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Ask this, show the answer, and end.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url", help="A running server, as http://127.0.0.1:8420; else one is started in here."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="PATH|HUBREF|ID",
            help="The model to load; with --url, the model ID to ask for.",
        ),
    ] = None,
    thinking_budget_tokens: Annotated[
        str | None,
        typer.Option("--thinking-budget-tokens", metavar="N|unlimited", help="Thinking tokens at most."),
    ] = None,
    thinking_budget_ms: Annotated[
        str | None,
        typer.Option("--thinking-budget-ms", metavar="N|unlimited", help="Milliseconds of thinking at most."),
    ] = None,
    temperature: Annotated[
        str | None, typer.Option("--temperature", metavar="X", help="Sampling temperature; 0 is greedy.")
    ] = None,
    max_tokens: Annotated[
        str | None, typer.Option("--max-tokens", metavar="N", help="Completion tokens at most.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message.")] = None,
    adapter: Annotated[
        str | None,
        typer.Option("--adapter", metavar="NAME", help="LoRA adapter to use; empty for the base model."),
    ] = None,
    no_thinking: Annotated[bool, typer.Option("--no-thinking", help="Switch the thinking off.")] = False,
    config: ConfigFlag = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", metavar="KEY", envvar="KILN_API_KEY", help="With --url, sent as a bearer token."
        ),
    ] = None,
) -> None:
    """Chat with a model. Ctrl-C stops the thinking first and the answer second."""
    with plain_errors():
        chat = Chat(url="", system=system and encodable(system), thinking=not no_thinking)
        chat.adapter = adapter and encodable(adapter)
        budgets = {"thinking_budget_tokens": thinking_budget_tokens, "thinking_budget_ms": thinking_budget_ms}
        for name, text in budgets.items():
            if text is not None:
                chat.budgets[name] = parse_flag(name, f"server.default_{name}", text)
        for name, text in {"temperature": temperature, "max_tokens": max_tokens}.items():
            if text is not None:
                chat.sampling[name] = parse_flag(name, f"sampling.{name}", text)
        with ExitStack() as stack:
            if url is not None:
                chat.url, chat.model = base_url(url), model
                chat.api_key = api_key
            else:
                chat.url = _start_server(stack, {"model": model, "config": config})
                chat.trust_env = False  # a proxy has no business between the two halves of one process
            status = run(chat, prompt, choose_view())
    raise typer.Exit(status)


def parse_flag(name: str, key: str, text: str) -> Any:
    """The value of a flag by the rules of the setting `key`. Raises ConfigError."""
    try:
        return parse_text(declarations()[key], text)
    except BadValue as allowed:
        flag = "--" + name.replace("_", "-")
        raise ConfigError(f"{flag} is {show_value(text)}: it must be {allowed}") from None


def _start_server(stack: ExitStack, parameters: dict[str, Any]) -> str:
    from kiln.cli.embedded import embedded_server

    settings = settings_from(parameters)
    console = notes()
    settings = with_model_file(settings, console)
    with console.status(f"loading {settings.model.path or 'the bundled model'}"):
        return stack.enter_context(embedded_server(settings))
