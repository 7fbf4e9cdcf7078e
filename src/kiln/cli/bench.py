"""`kiln bench`: put load on any OpenAI-compatible server, or on two in turn, and measure."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
from rich.console import Console

from kiln.cli.common import notes, plain_errors
from kiln.core.errors import ConfigError
from kiln.core.wording import reason
from kiln.loadgen.chart import check_plot_path, save_plot
from kiln.loadgen.client.target import DEFAULT_TIMEOUT_S, Target, parse_target
from kiln.loadgen.client.trace import Trace
from kiln.loadgen.compare import Comparison
from kiln.loadgen.distributions import parse_lengths
from kiln.loadgen.load import ClosedLoop, Load, Poisson, Until, run
from kiln.loadgen.prompts import BodyOptions, PromptShape, encode_body, read_dataset
from kiln.loadgen.report import Limits, Report
from kiln.loadgen.session import Plan, Session
from kiln.loadgen.tables import show_comparison, show_report

T = TypeVar("T")
LENGTHS = "N|DISTRIBUTION"
MAX_CONCURRENCY = 4096
INTERRUPTED = 130


def bench(
    context: typer.Context,
    url: Annotated[str, typer.Argument(metavar="URL", help="The server, as http://127.0.0.1:8420.")],
    against: Annotated[
        str | None, typer.Option("--against", metavar="URL", help="Compare with this server, in turn.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", min=1, help="Rounds of a comparison.")] = 7,
    concurrency: Annotated[
        str, typer.Option("--concurrency", metavar="N[,N…]", help="Requests under way at a time.")
    ] = "1",
    rate: Annotated[
        float | None,
        typer.Option("--rate", metavar="R", help="Requests a second, at random, instead of --concurrency."),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests", metavar="N", min=1, help="Requests of each load; unset, 8 a stream, 16 at least."
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option("--duration", metavar="S", help="Seconds after which no more requests are begun."),
    ] = None,
    warmup: Annotated[
        int, typer.Option("--warmup", metavar="N", min=0, help="Requests before each load, not measured.")
    ] = 1,
    prompt_tokens: Annotated[
        str, typer.Option("--prompt-tokens", metavar=LENGTHS, help="Length of the generated prompts.")
    ] = "128",
    output_tokens: Annotated[
        str, typer.Option("--output-tokens", metavar=LENGTHS, help="Output tokens at most (max_tokens).")
    ] = "128",
    shared_prefix: Annotated[
        int,
        typer.Option("--shared-prefix", metavar="TOKENS", min=0, help="Tokens that all prompts begin with."),
    ] = 0,
    dataset: Annotated[
        Path | None,
        typer.Option("--dataset", metavar="FILE", help="Prompts from a JSON Lines file, in its order."),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Seed of prompts, lengths and arrivals.")
    ] = 0,
    endpoint: Annotated[
        Literal["chat", "completions"],
        typer.Option("--endpoint", metavar="chat|completions", help="The route to load."),
    ] = "chat",
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="ID", help="Model ID to ask for; unset, the first one listed."),
    ] = None,
    against_model: Annotated[
        str | None, typer.Option("--against-model", metavar="ID", help="The same for the second server.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", metavar="KEY", help="Sent as a bearer token.")
    ] = None,
    against_api_key: Annotated[
        str | None, typer.Option("--against-api-key", metavar="KEY", help="The same for the second server.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", metavar="X", min=0, help="Sampling temperature; unset, the server's."),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for all output tokens, past the model's own end.")
    ] = False,
    body: Annotated[
        str, typer.Option("--body", metavar="JSON", help="More fields of each request, as a JSON object.")
    ] = "{}",
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", help="Seconds that a request may take.")
    ] = DEFAULT_TIMEOUT_S,
    slo_ttft_ms: Annotated[
        float | None,
        typer.Option("--slo-ttft-ms", metavar="MS", help="Goodput: time to the first token at most."),
    ] = None,
    slo_itl_ms: Annotated[
        float | None,
        typer.Option("--slo-itl-ms", metavar="MS", help="Goodput: p99 of a request's token gaps at most."),
    ] = None,
    slo_answer_ms: Annotated[
        float | None,
        typer.Option(
            "--slo-answer-ms", metavar="MS", help="Goodput: time to the first answer token at most."
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures to this file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the latencies, as .svg or .png.")
    ] = None,
) -> None:
    """Measure a server under load: latencies, throughput, goodput. Ctrl-C ends it with what there is."""
    with plain_errors():
        _refuse_idle(context, against, dataset)
        _positive(rate=rate, duration=duration, timeout=timeout)
        _positive(slo_ttft_ms=slo_ttft_ms, slo_itl_ms=slo_itl_ms, slo_answer_ms=slo_answer_ms)
        shape = PromptShape(
            parse_lengths(prompt_tokens, "--prompt-tokens"),
            parse_lengths(output_tokens, "--output-tokens"),
            shared_prefix,
        )
        plan = Plan(
            loads=parse_loads(concurrency, rate, context.get_parameter_source("concurrency")),
            until=Until(requests, duration),
            warmup=warmup,
            shape=shape,
            dataset=None if dataset is None else tuple(read_dataset(dataset)),
            options=BodyOptions(endpoint, None, temperature, ignore_eos, parse_body(body)),
            limits=Limits(slo_ttft_ms, slo_itl_ms, slo_answer_ms),
            seed=seed,
        )
        for prompt in plan.dataset or ():
            encode_body(prompt, plan.options)  # a prompt of the wrong kind is found before any load
        targets = [parse_target(url, model=model, api_key=api_key, timeout_s=timeout)]
        if against is not None:
            targets.append(
                parse_target(against, model=against_model, api_key=against_api_key, timeout_s=timeout)
            )
        outputs = Outputs(json_file, plot)
        outputs.check()
        interrupted = _measure(plan, targets, rounds, outputs)
    raise typer.Exit(INTERRUPTED if interrupted else 0)


def _refuse_idle(context: typer.Context, against: str | None, dataset: Path | None) -> None:
    """Raise ConfigError for a flag that was given and would change nothing beside the others."""

    def given(*names: str) -> str | None:
        sources = ((name, context.get_parameter_source(name)) for name in names)
        return next((name for name, source in sources if source and source.name == "COMMANDLINE"), None)

    if against is None and (name := given("rounds", "against_model", "against_api_key")):
        raise ConfigError(
            f"{_flag(name)} is for a comparison",
            hint="Name the second server with --against, or leave it out.",
        )
    if dataset is not None and (name := given("prompt_tokens", "shared_prefix")):
        raise ConfigError(
            f"{_flag(name)} and --dataset exclude each other", hint="The prompts are those of the file."
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{_flag(name)} is {value:g}: it must be a number above 0")


def parse_loads(concurrency: str, rate: float | None, source: Any) -> tuple[Load, ...]:
    """`4` or `1,4,16` as closed loops, or one open loop of a rate. Raises ConfigError."""
    if rate is not None:
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigError("--rate and --concurrency exclude each other", hint="Leave one of them out.")
        return (Poisson(rate),)
    levels = concurrency.split(",")
    if not all(
        level.isascii() and level.isdigit() and 1 <= int(level) <= MAX_CONCURRENCY for level in levels
    ):
        raise ConfigError(
            f"--concurrency is {concurrency!r}", hint=f"Write numbers from 1 to {MAX_CONCURRENCY}, as 1,4,16."
        )
    return tuple(ClosedLoop(int(level)) for level in levels)


def parse_body(text: str) -> dict[str, Any]:
    """The object given with --body. Raises ConfigError."""
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--body is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError("--body is no JSON object", hint="Write it as '{\"thinking_budget_tokens\": 64}'.")
    return fields


def _measure(plan: Plan, targets: Sequence[Target], rounds: int, outputs: Outputs) -> bool:
    """Run the plan and show what came of it; True if it was interrupted."""
    console = notes()
    if len(targets) == 2 and targets[0].url == targets[1].url:
        console.print("both are one server: whichever comes second in a round finds the prompts in its cache")
    progress = Progress(console)
    stop = asyncio.Event()
    session = Session(plan, stop, progress.on_trace)
    with progress:
        if len(targets) == 1:
            outputs.reports = run(_stoppable(session.run_one(targets[0]), stop))
        else:
            results = run(_stoppable(session.compare(targets[0], targets[1], rounds), stop))
            outputs.comparisons = [comparison for comparison, _ in results if comparison.rounds]
            outputs.reports = [report for _, rest in results for report in rest]
    # Wide enough for every column where nobody sees the width, as in a pipe.
    outputs.show(Console(width=None if sys.stdout.isatty() else 140))
    outputs.write()
    return stop.is_set()


async def _stoppable(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T:
    """Await the work; a Ctrl-C meanwhile sets `stop` and is no exception."""
    loop = asyncio.get_running_loop()
    # Elsewhere than in the main thread of a POSIX system there is no such handler.
    with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
        loop.add_signal_handler(signal.SIGINT, stop.set)
    return await work


@dataclass
class Outputs:
    """Where the results go, and the results."""

    json_file: Path | None
    plot: Path | None
    reports: Sequence[Report] = ()
    comparisons: Sequence[Comparison] = ()

    def check(self) -> None:
        """Raise ConfigError, before any load, for a file that could not be written after it."""
        if self.plot is not None:
            check_plot_path(self.plot)
        for flag, path in (("--json", self.json_file), ("--plot", self.plot)):
            if path is not None and (why := _why_unwritable(path)) is not None:
                raise ConfigError(f"{flag} {path} cannot be written: {why}")

    def show(self, console: Console) -> None:
        for comparison in self.comparisons:
            console.print(show_comparison(comparison))
        for report in self.reports:
            console.print(show_report(report), highlight=False)

    def write(self) -> None:
        if self.json_file is not None:
            content = {
                "format": "kiln-bench/1",
                "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
                "reports": [report.as_json() for report in self.reports],
                "comparisons": [comparison.as_json() for comparison in self.comparisons],
            }
            try:
                self.json_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"--json {self.json_file} cannot be written: {reason(error)}") from None
        if self.plot is not None:
            compared = [r for c in self.comparisons for pair in c.rounds for r in pair]
            save_plot(self.plot, [*compared, *self.reports])


def _why_unwritable(path: Path) -> str | None:
    if path.is_dir():
        return "it is a folder"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"{path if path.exists() else path.parent} is write-protected"
    return None


class Progress:
    """On a terminal, a line that counts the requests that have ended."""

    def __init__(self, console: Console) -> None:
        self._status = console.status("warming up") if console.is_terminal else None
        self._load = ""
        self._ended = self._failed = 0

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._status is not None:
            self._status.stop()

    def on_trace(self, load: str, trace: Trace) -> None:
        if load != self._load:
            self._load, self._ended, self._failed = load, 0, 0
        self._ended += 1
        self._failed += not trace.ok
        if self._status is not None:
            failed = f", {self._failed} failed" if self._failed else ""
            self._status.update(f"{load}: {self._ended} ended{failed}")
