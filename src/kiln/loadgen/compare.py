"""Two servers under the same load, in turn: the ratios of their figures, and how far they spread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

from kiln.loadgen.quantiles import Spread, spread
from kiln.loadgen.report import Report


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a report that is compared; `path` leads to it.

    `higher_is_better` is None where neither is: such a row shows whether both sides did the same work.
    """

    name: str
    path: str
    unit: str
    higher_is_better: bool | None = False

    def of(self, report: Report) -> float | None:
        try:
            value: float | None = attrgetter(self.path)(report)
        except AttributeError:  # the summary on the way there is None
            return None
        return value


METRICS = (
    Metric("full-load rate", "window_tokens_per_s", "tok/s", True),
    Metric("overall rate", "tokens_per_s", "tok/s", True),
    Metric("all done", "span_s", "s"),
    Metric("TTFT p50", "ttft_ms.p50", "ms"),
    Metric("TTFT p99", "ttft_ms.p99", "ms"),
    Metric("answer p50", "answer_ms.p50", "ms"),
    Metric("ITL p50", "itl_ms.p50", "ms"),
    Metric("ITL p99", "itl_ms.p99", "ms"),
    Metric("token time p50", "tpot_ms.p50", "ms"),
    Metric("end-to-end p50", "e2e_ms.p50", "ms"),
    Metric("end-to-end p99", "e2e_ms.p99", "ms"),
    Metric("goodput share", "goodput.share", "", True),
    Metric("prompt mean", "prompt_tokens.mean", "tok", None),
    Metric("output mean", "output_tokens.mean", "tok", None),
)
# Of fewer rounds the extremes say nothing of how far they spread.
LEAST_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class RatioRow:
    """A/B of one metric over the rounds. The medians are of each side's own rounds.

    `failed`: some request of a round failed, so the sides did not do the same work.
    """

    metric: Metric
    ratio: Spread
    a_median: float
    b_median: float
    failed: bool = False

    @property
    def better(self) -> str:
        """`A` or `B` where three rounds or more all agree and no request failed, else an empty text."""
        higher = self.metric.higher_is_better
        if higher is None or self.failed or self.ratio.count < LEAST_ROUNDS:
            return ""
        if self.ratio.low > 1:
            return "A" if higher else "B"
        if self.ratio.high < 1:
            return "B" if higher else "A"
        return ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The reports of each round, A's and B's."""

    rounds: list[tuple[Report, Report]]

    def rows(self, metrics: Sequence[Metric] = METRICS) -> list[RatioRow]:
        found = (self._row(metric) for metric in metrics)
        return [row for row in found if row is not None]

    def _row(self, metric: Metric) -> RatioRow | None:
        pairs = [(metric.of(a), metric.of(b)) for a, b in self.rounds]
        full = [(a, b) for a, b in pairs if a is not None and b is not None and b > 0]
        ratio = spread(a / b for a, b in full)
        a_side, b_side = spread(a for a, _ in full), spread(b for _, b in full)
        if ratio is None or a_side is None or b_side is None:
            return None
        failed = any(report.succeeded < report.requests for pair in self.rounds for report in pair)
        return RatioRow(metric, ratio, a_side.median, b_side.median, failed)

    def as_json(self) -> dict[str, Any]:
        return {
            "ratios": [
                {
                    "metric": row.metric.name,
                    "unit": row.metric.unit,
                    "higher_is_better": row.metric.higher_is_better,
                    "ratio": asdict(row.ratio),
                    "a_median": row.a_median,
                    "b_median": row.b_median,
                    "better": row.better or None,
                }
                for row in self.rows()
            ],
            "rounds": [{"a": a.as_json(), "b": b.as_json()} for a, b in self.rounds],
        }


def turns(rounds: int) -> list[tuple[int, str]]:
    """The order of a comparison, as (round, side): A goes first in even rounds, B in odd ones."""
    return [(n, side) for n in range(rounds) for side in ("AB" if n % 2 == 0 else "BA")]


def compare_figures(
    measure_a: Callable[[int], float], measure_b: Callable[[int], float], rounds: int
) -> tuple[Spread, float, float]:
    """Call two measurements in alternating order; gives the spread of A/B and both medians.

    Each is called with the number of the round, to be used as a seed.
    """
    values: dict[str, list[float]] = {"A": [], "B": []}
    for n, side in turns(rounds):
        values[side].append((measure_a if side == "A" else measure_b)(n))
    ratios = spread(a / b for a, b in zip(values["A"], values["B"], strict=True))
    a_side, b_side = spread(values["A"]), spread(values["B"])
    assert ratios is not None and a_side is not None and b_side is not None
    return ratios, a_side.median, b_side.median
