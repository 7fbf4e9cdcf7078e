"""How a chat looks: live on a terminal, plain text elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from kiln.cli.chat.exchange import Exchange, Phase, Piece
from kiln.core.wording import counted

TAIL_LINES = 8


class View(Protocol):
    """Shows one exchange after the other. `begin` opens one, `end` closes it whatever happened."""

    def begin(self, exchange: Exchange) -> None: ...

    def show(self, piece: Piece) -> None: ...

    def end(self) -> None: ...

    def note(self, text: str) -> None: ...


def choose_view() -> View:
    """The live view if standard output is a terminal that can do it."""
    if sys.stdout.isatty():
        console = Console(highlight=False, markup=False)
        if not console.is_dumb_terminal:
            return TerminalView(console)
    return PlainView(sys.stdout, sys.stderr)


def printable(text: str) -> str:
    """The text without control characters: a model's output must not steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or not (ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0))


class PlainView:
    """The answer on `out`, thinking and notes on `side`, so that a pipe gets the answer alone."""

    def __init__(self, out: TextIO, side: TextIO) -> None:
        self._out = out
        self._side = side
        self._phase = Phase.WAITING

    def begin(self, exchange: Exchange) -> None:
        self._phase = Phase.WAITING

    def show(self, piece: Piece) -> None:
        text = piece.text
        if piece.phase is not self._phase:
            self._close_line()
            if piece.phase is Phase.THINKING:
                self._side.write("[thinking]\n")
            text = text.lstrip("\n")
            self._phase = piece.phase
        stream = self._side if piece.phase is Phase.THINKING else self._out
        stream.write(printable(text))
        stream.flush()

    def end(self) -> None:
        self._close_line()
        self._phase = Phase.WAITING

    def note(self, text: str) -> None:
        if self._phase is Phase.THINKING:
            self._side.write("\n")
        print(f"[{text}]", file=self._side, flush=True)

    def _close_line(self) -> None:
        if self._phase is not Phase.WAITING:
            stream = self._side if self._phase is Phase.THINKING else self._out
            stream.write("\n")
            stream.flush()


class TerminalView:
    """Thinking dimmed with a live count and timer below its last lines; the answer streams in plain."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._exchange: Exchange | None = None
        self._live: Live | None = None
        self._thought = ""
        self._answering = False

    def begin(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._thought = ""
        self._answering = False
        self._live = Live(
            console=self._console,
            get_renderable=self._frame,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            refresh_per_second=10,
        )
        self._live.start()

    def show(self, piece: Piece) -> None:
        text = printable(piece.text)
        if piece.phase is Phase.THINKING:
            if self._live is None:
                self._console.print(Text(text, style="dim"), end="")
            self._thought += text
            return
        if not self._answering:
            self._settle_thinking()
            text = text.lstrip("\n")
            self._answering = True
        self._console.out(text, end="", highlight=False)
        self._console.file.flush()

    def end(self) -> None:
        self._settle_thinking()
        if self._answering:
            self._console.out("")
        self._answering = False

    def note(self, text: str) -> None:
        self._console.print(Text(text, style="dim italic"))

    def _settle_thinking(self) -> None:
        """Replace the live display by the whole thinking, dimmed."""
        if self._live is None:
            return
        self._live.stop()
        self._live = None
        if self._thought.strip():
            self._console.print(Text(self._thought.strip(), style="dim"), soft_wrap=True)
            self._console.out("")

    def _frame(self) -> RenderableType:
        exchange = self._exchange
        if exchange is None:
            return Text("")
        now = time.monotonic()
        if exchange.phase is Phase.WAITING:
            return Text(f"waiting {now - exchange.started_s:.1f} s", style="dim")
        width = self._console.width
        wrapped = Text(self._thought.strip()[-width * TAIL_LINES * 2 :], style="dim").wrap(
            self._console, width
        )
        tokens = counted(exchange.thinking_tokens(), "token")
        footer = f"thinking · {tokens} · {exchange.thinking_s(now):.1f} s"
        footer += " · closing" if exchange.skip_asked else " · Ctrl-C: answer now"
        return Group(*wrapped[-TAIL_LINES:], Text(footer, style="cyan", overflow="ellipsis", no_wrap=True))
