"""`kiln serve`: the server."""

from __future__ import annotations

import typer
from rich.console import Console

from kiln.cli.common import (
    AdapterDirFlag,
    BudgetMsFlag,
    BudgetTokensFlag,
    ConfigFlag,
    CtxSizeFlag,
    EngineFlag,
    HostFlag,
    LogLevelFlag,
    ModelFlag,
    ParallelFlag,
    PortFlag,
    ServedModelIdFlag,
    ThreadsFlag,
    notes,
    plain_errors,
    settings_from,
    with_model_file,
)
from kiln.core.settings import Settings

MESSAGES = '"messages":[{"role":"user","content":"3+8-2+7=?"}]'


def serve(
    ctx: typer.Context,
    model: ModelFlag = None,
    adapter_dir: AdapterDirFlag = None,
    host: HostFlag = None,
    port: PortFlag = None,
    threads: ThreadsFlag = None,
    parallel: ParallelFlag = None,
    ctx_size: CtxSizeFlag = None,
    config: ConfigFlag = None,
    engine: EngineFlag = None,
    log_level: LogLevelFlag = None,
    default_thinking_budget_tokens: BudgetTokensFlag = None,
    default_thinking_budget_ms: BudgetMsFlag = None,
    served_model_id: ServedModelIdFlag = None,
) -> None:
    """Serve a model over HTTP. Without --model, the small model that comes with kiln."""
    with plain_errors():
        # The flags are read by name from the context, so that they are listed once, in common.FLAGS.
        settings = settings_from(ctx.params)
        console = notes()
        asked = settings.model.path
        settings = with_model_file(settings, console)
        _run(settings, asked or "the bundled model", console)


def _run(settings: Settings, model_name: str, console: Console) -> None:
    # Imported late, so that help and configuration errors come at once.
    from kiln.cli import server

    if not console.is_terminal:
        console.print(f"loading {model_name}")
    status = console.status(f"loading {model_name}")

    def show_ready(url: str, can_think: bool) -> None:
        status.stop()
        print(ready_text(url, model_name, settings, can_think=can_think), flush=True)

    with status:
        server.serve(settings, on_ready=show_ready)


def ready_text(url: str, model_name: str, settings: Settings, *, can_think: bool = True) -> str:
    """What `kiln serve` prints once it answers; budgets are offered where they have an effect."""
    example = f'{{{MESSAGES},"thinking_budget_tokens":16}}' if can_think else f"{{{MESSAGES}}}"
    key, access = "", ""
    if not settings.serves_anonymous:
        key = ' -H "authorization: Bearer $KILN_API_KEY"'
        access = "\nRequests need an API key; `kiln keys create NAME` makes one, at once in force."
    return f"""kiln serves {model_name} at {url}

try:  curl -s {url}/v1/chat/completions -H 'content-type: application/json'{key} \\
        -d '{example}'

{_about_budgets(settings) if can_think else NO_THINKING}{access}
`kiln config` shows all settings. Ctrl-C stops the server."""


NO_THINKING = "The model's chat template has no thinking, so budgets of thinking have no effect."


def _about_budgets(settings: Settings) -> str:
    tokens = _limit(settings.server.default_thinking_budget_tokens, "tokens")
    time = _limit(settings.server.default_thinking_budget_ms, "ms")
    return f"""\
Thinking budgets: a request sets thinking_budget_tokens and thinking_budget_ms (null = unlimited).
Requests that leave them out get {tokens} and {time};
server.default_thinking_budget_tokens and server.default_thinking_budget_ms change that."""


def _limit(value: int | None, unit: str) -> str:
    return f"unlimited {unit}" if value is None else f"{value} {unit}"
