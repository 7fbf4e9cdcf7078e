"""Cumulative distributions of latencies as an SVG of its own making, or a PNG where matplotlib is there."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from kiln.core.errors import ConfigError
from kiln.core.wording import reason
from kiln.loadgen.quantiles import quantile
from kiln.loadgen.report import Report

# Colours that stay apart for colour-blind readers (Okabe and Ito, 2008).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
PANELS = (
    ("ttft_ms", "Time to first token"),
    ("answer_ms", "Time to first answer token"),
    ("itl_ms", "Inter-token gap"),
    ("e2e_ms", "End to end"),
)
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 300, 56, 16, 34, 46
LEGEND_LINE = 18
MARKED = (0.5, 0.9, 0.99)
MAX_POINTS = 400
# A span of more than this factor is drawn on a logarithmic axis.
LOG_FROM = 30


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    values: dict[str, list[float]]


def series_of(reports: Sequence[Report]) -> list[Series]:
    """One line for each report; reports of the same label and load are joined."""
    found: dict[str, dict[str, list[float]]] = {}
    for report in reports:
        values = found.setdefault(f"{report.label}, {report.load}", {key: [] for key, _ in PANELS})
        for key, _ in PANELS:
            values[key] += getattr(report.samples, key)
    return [Series(name, {key: sorted(v) for key, v in values.items()}) for name, values in found.items()]


def save_plot(path: Path, reports: Sequence[Report]) -> None:
    """Write the plot; the name's ending chooses the format. Raises ConfigError."""
    check_plot_path(path)
    series = series_of(reports)
    try:
        if path.suffix == ".svg":
            path.write_text(draw_svg(series), encoding="utf-8")
        else:
            _save_png(path, series)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {reason(error)}") from None


def check_plot_path(path: Path) -> None:
    """Raise ConfigError, before any load is made, for a format that cannot be written."""
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"--plot {path}: the name must end with .svg or .png")
    if path.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"--plot {path}: a PNG needs matplotlib, which is not installed",
            hint="Run `pip install matplotlib`, or write an .svg, which needs nothing.",
        )


@dataclass(frozen=True, slots=True)
class Axis:
    """Places values between 0 and 1."""

    low: float
    high: float
    log: bool

    def place(self, value: float) -> float:
        if self.log:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1,) if len(decades) > 4 else (1, 2, 5)
            candidates = [step * 10.0**decade for decade in decades for step in steps]
        else:
            step = _nice((self.high - self.low) / 8)
            candidates = [step * n for n in range(math.floor(self.high / step) + 1)]
        slack = 1e-9 * self.high
        return [tick for tick in candidates if self.low - slack <= tick <= self.high + slack]


def choose_axis(values: Sequence[float]) -> Axis:
    """An axis for ascending values: from 0 where their span is small, logarithmic where it is large."""
    high = max(values[-1], 1e-3) if values else 1.0
    positive = [value for value in values if value > 0]
    low = quantile(positive, 0.02) if positive else high
    if high / low > LOG_FROM:
        return Axis(low, high * 1.05, True)
    return Axis(0.0, high * 1.05, False)


def _nice(step: float) -> float:
    """The next larger of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(nice * power for nice in (1, 2, 5, 10) if nice * power >= step * (1 - 1e-9))


def cdf_points(ordered: Sequence[float]) -> list[tuple[float, float]]:
    """(value, share) along the quantile function, at most MAX_POINTS of them."""
    count = min(len(ordered), MAX_POINTS)
    if count == 1:
        return [(ordered[0], 0.0), (ordered[0], 1.0)]
    return [(quantile(ordered, i / (count - 1)), i / (count - 1)) for i in range(count)]


def draw_svg(series: Sequence[Series]) -> str:
    """Four panels, each with the share of requests (or gaps) that took at most so long."""
    width, height = 2 * WIDTH, 2 * HEIGHT + LEGEND_LINE * len(series) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for n, (key, title) in enumerate(PANELS):
        parts.append(f'<g transform="translate({n % 2 * WIDTH} {n // 2 * HEIGHT})">')
        parts += _panel(title, [one.values[key] for one in series])
        parts.append("</g>")
    for n, one in enumerate(series):
        y = 2 * HEIGHT + LEGEND_LINE * n + 10
        colour = COLOURS[n % len(COLOURS)]
        parts.append(
            f'<line x1="{LEFT}" x2="{LEFT + 24}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(f'<text x="{LEFT + 32}" y="{y + 4}">{escape(one.name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(title: str, lines: Sequence[Sequence[float]]) -> list[str]:
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    axis = choose_axis(sorted(value for line in lines for value in line))

    def x(value: float) -> str:
        return f"{LEFT + wide * axis.place(value):.1f}"

    def y(share: float) -> str:
        return f"{TOP + high * (1 - share):.1f}"

    parts = [f'<text x="{LEFT}" y="20" font-size="13" font-weight="bold">{title}</text>']
    for tick in axis.ticks():
        parts.append(f'<line x1="{x(tick)}" x2="{x(tick)}" y1="{TOP}" y2="{TOP + high}" stroke="#e0e0e0"/>')
        parts.append(f'<text x="{x(tick)}" y="{TOP + high + 15}" text-anchor="middle">{tick:g}</text>')
    for share in (0.0, *MARKED):
        dash = "" if share == 0 else ' stroke-dasharray="3 3"'
        parts.append(
            f'<line x1="{LEFT}" x2="{LEFT + wide}" y1="{y(share)}" y2="{y(share)}" stroke="#a0a0a0"{dash}/>'
        )
        name = "0" if share == 0 else f"p{share * 100:g}"
        parts.append(f'<text x="{LEFT - 6}" y="{float(y(share)) + 4:.1f}" text-anchor="end">{name}</text>')
    unit = "ms, logarithmic" if axis.log else "ms"
    parts.append(f'<text x="{LEFT + wide / 2}" y="{HEIGHT - 12}" text-anchor="middle">{unit}</text>')
    for n, line in enumerate(lines):
        if line:
            points = " ".join(f"{x(value)},{y(share)}" for value, share in cdf_points(line))
            colour = COLOURS[n % len(COLOURS)]
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
    if not any(lines):
        parts.append(f'<text x="{LEFT + wide / 2}" y="{TOP + high / 2}" text-anchor="middle">none</text>')
    return parts


def _save_png(path: Path, series: Sequence[Series]) -> None:
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(11, 7.5), layout="constrained")
    for plot, (key, title) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        axis = choose_axis(sorted(value for one in series for value in one.values[key]))
        for n, one in enumerate(series):
            if one.values[key]:
                values, shares = zip(*cdf_points(one.values[key]), strict=True)
                plot.plot(values, shares, color=COLOURS[n % len(COLOURS)], label=one.name)
        plot.set(title=title, xlabel="ms", ylabel="share", xscale="log" if axis.log else "linear")
        plot.set_xlim(axis.low, axis.high)
        plot.grid(alpha=0.3)
    handles, names = figure.axes[-1].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower left")
    figure.savefig(path, dpi=144)
