"""Results of the seeds as lines of a table: mean and spread beside goals, time and memory."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.quality.part import Goal, QualityCase, QualityPart
from bench.quality.results import Results

_WIDTH = 180
COLUMNS = ("case", "metric", "mean", "sd", "seeds", "floor", "aim", "reached", "seconds", "peak MiB")


@dataclass(frozen=True)
class Line:
    """One metric of one case over its seeds.

    sd: the standard deviation over the seeds (divisor n - 1), None of one seed; interval: of the first seed's
    bootstrap; seconds and peak_mib: the greatest of the seeds.
    """

    case: str
    metric: str
    mean: float
    sd: float | None
    seeds: tuple[int, ...]
    goal: Goal | None
    seconds: float | None
    peak_mib: float | None
    interval: tuple[float, float] | None = None

    def cells(self) -> list[str]:
        """Return the cells of the line, in the order of `COLUMNS`."""
        goal = self.goal or Goal()
        return [
            self.case,
            self.metric,
            f"{self.mean:.4f}",
            "" if self.sd is None else f"{self.sd:.4f}",
            ", ".join(map(str, self.seeds)),
            _figure(goal.floor),
            _figure(goal.aim),
            self.goal.reached(self.mean) if self.goal else "",
            "" if self.seconds is None else f"{self.seconds:,.0f}",
            "" if self.peak_mib is None else f"{self.peak_mib:,.0f}",
        ]

    def record(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {**asdict(self), "reached": self.goal.reached(self.mean) if self.goal else None}


def lines_of(name: str, part: QualityPart, results: Results, seeds: Sequence[int]) -> list[Line]:
    """Return the lines of a part's cases that have results, in the part's order."""
    return [line for case in part.cases for line in _lines_of_case(name, part, case, results, seeds)]


def _lines_of_case(
    name: str, part: QualityPart, case: QualityCase, results: Results, seeds: Sequence[int]
) -> list[Line]:
    by_seed = {seed: r for seed in seeds if (r := results.load(name, case, seed)) is not None}
    if not by_seed:
        return []
    first = next(iter(by_seed.values()))
    lines = []
    for metric in part.shown_metrics(case, list(first.metrics)):
        values = [r.metrics[metric] for r in by_seed.values() if metric in r.metrics]
        ends = first.intervals.get(metric)
        lines.append(
            Line(
                case.name,
                metric,
                statistics.fmean(values),
                statistics.stdev(values) if len(values) > 1 else None,
                tuple(by_seed),
                case.goals.get(metric),
                max((r.seconds for r in by_seed.values() if r.seconds is not None), default=None),
                max((r.peak_mib for r in by_seed.values() if r.peak_mib is not None), default=None),
                (ends[0], ends[1]) if ends else None,
            )
        )
    return lines


def show(part: QualityPart, lines: Sequence[Line]) -> None:
    """Print a part's table, and below it what was published."""
    table = Table(title=part.title)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("case", "metric", "reached") else "right")
    for line in lines:
        table.add_row(*line.cells())
    console = Console()
    # In a file or a pipe nobody's window is narrow.
    console = console if console.is_terminal else Console(width=_WIDTH)
    console.print(table)
    for p in part.published:
        figures = ", ".join(f"{metric} {value:g}" for metric, value in p.metrics.items())
        console.print(f"published: {p.model}: {figures} ({p.source})", markup=False, highlight=False)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
