"""Results of `make quality` and docs/quality.md from those that are there: `python -m bench.quality.page`.

Results of (case, seed) are files: each appears whole, and stands while the case's settings are the same. Those of the
seeds are lines of a table: mean and spread beside goals, time and memory.
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.quality.cases import CaseResult, Goal, QualityCase, QualityPart, load_parts
from bench.report import checkout_version
from headrace.config.installation import checkout
from headrace.stage.manifest import fingerprint
from headrace.storage import local

_FORM = 1


@dataclass(frozen=True)
class Results:
    """The files of one folder, by default build/quality/results."""

    folder: Path

    @staticmethod
    def default() -> Results:
        """Return the results below build/quality."""
        return Results(quality_folder() / "results")

    def path(self, part: str, case: QualityCase, seed: int) -> Path:
        """Return the file of a result."""
        name = re.sub(r"[^a-z0-9]+", "-", case.name.lower()).strip("-")
        return self.folder / part / f"{name}.{seed}.json"

    def load(self, part: str, case: QualityCase, seed: int) -> CaseResult | None:
        """Load the result of the case as it is now; None where there is none, or one of other settings."""
        try:
            record = json.loads(self.path(part, case, seed).read_text(encoding="utf-8"))
            if record["form"] != _FORM or record["settings"] != settings_key(case):
                return None
            return CaseResult(**record["result"])
        except (FileNotFoundError, KeyError, TypeError, ValueError):
            return None

    def save(self, part: str, case: QualityCase, seed: int, result: CaseResult) -> None:
        """Write a result, in one step."""
        record = {
            "form": _FORM,
            "part": part,
            "case": case.name,
            "seed": seed,
            "settings": settings_key(case),
            "code": checkout_version(),
            "machine": machine(),
            "result": asdict(result),
        }
        local(self.path(part, case, seed)).put_text(json.dumps(record, indent=1) + "\n")

    def machines(self) -> list[str]:
        """Return the machines, in words, that results come from."""
        files = sorted(self.folder.glob("*/*.json"))
        return sorted({json.loads(f.read_text(encoding="utf-8"))["machine"] for f in files})


def quality_folder() -> Path:
    """Return the folder of results and workspaces."""
    return checkout() / "build" / "quality"


def settings_key(case: QualityCase) -> str:
    """Return the fingerprint of what a result depends on besides the seed."""
    settings: Mapping[str, Any] = case.all_settings()
    return fingerprint(settings)


def machine() -> str:
    """Return this machine in words: processor, cores, memory."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = re.findall(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        model = names[0].strip() if names else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores ({model}), {memory:.0f} GiB"


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


SEEDS = (1, 2, 3)

_HEAD = """# Quality

This page compares headrace's models with published figures on the same splits, and with the best possible AUC of
generated clicks.

    make quality                               # all parts, seeds 1, 2, 3: the seconds below sum to 6 hours
    make quality PARTS=beauty,adult SEEDS=1,2  # some
    python -m bench.quality.page               # writes this page from the results

Each case is a pipeline of `conf/pipelines`, run as a user would run it: landing files, lake, features, training and
evaluation over all ranks. Training is `headrace train` on Horovod's ranks, or `headrace baseline` for XGBoost.

- **Data** is not shipped. `make quality` names and skips a part whose folder in `../shared/data` is missing.
- **Results** are files in `build/quality/results`, one for each case and seed. They count while the case's settings are
  the same, so the same command resumes where it was stopped. `build/quality/quality.json` has all figures.
- **New parts**: see `bench/quality/__init__.py`.

| column | meaning |
| --- | --- |
| mean | the mean over the seeds. A seed decides initial weights, the order of batches and negatives, never the split |
| sd | the standard deviation over the seeds (divisor n − 1) |
| floor, aim | the figure that the case must reach, and the one that it aims at |
| reached | the better of the two that the mean reaches |
| seconds | those of the stage: start of Spark and of the ranks, training, evaluation |
| peak MiB | peak memory of all processes of the stage, including the JVM: the greatest of the seeds |
| 95 % interval | bootstrap of the first seed |

The figures were made with `make quality QUALITY_ARGS="--ranks 1 --threads 1"`, at a low priority beside other work. So
the seconds are longer than those of a quiet machine. Ranks and threads change a metric only by the rounding of sums.
"""


def page(parts: Mapping[str, QualityPart], results: Results, seeds: Sequence[int] = SEEDS) -> str:
    """Return the page of all parts."""
    sections = [_HEAD]
    machines = results.machines()
    if machines:
        sections.append(f"Machine: {'; '.join(machines)}.\n")
    for name, part in parts.items():
        sections.append(f"## {part.title}\n\n`make quality PARTS={name}`\n\n{part.protocol.strip()}\n")
        lines = lines_of(name, part, results, seeds)
        sections.append(_markdown_table(lines) if lines else "No results yet.\n")
        if part.published:
            sections.append(_published(part))
        if notes := _notes(name, part, results, seeds):
            sections.append(notes)
    return "\n".join(sections)


def _markdown_table(lines: Sequence[Line]) -> str:
    intervals = any(line.interval for line in lines)
    header = [*COLUMNS, *(["95 % interval"] if intervals else [])]
    rows = []
    for line in lines:
        ends = line.interval
        interval_cell = [f"{ends[0]:.4f} to {ends[1]:.4f}" if ends else ""] if intervals else []
        rows.append([*line.cells(), *interval_cell])
    left = {"case", "metric", "reached"}
    rule = ["---" if name in left else "---:" for name in header]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)) + "\n"


def _published(part: QualityPart) -> str:
    metrics = list(dict.fromkeys(m for p in part.published for m in p.metrics))
    header = ["published", *metrics, "source"]
    rule = ["---", *("---:" for _ in metrics), "---"]
    rows = [
        [p.model, *(f"{p.metrics[m]:.4g}" if m in p.metrics else "" for m in metrics), p.source] for p in part.published
    ]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)) + "\n"


def _notes(name: str, part: QualityPart, results: Results, seeds: Sequence[int]) -> str:
    """Return the notes of the cases; one line where all of them say the same."""
    notes: dict[str, dict[str, list[str]]] = {}
    for case in part.cases:
        for seed in seeds:
            result = results.load(name, case, seed)
            for key, value in (result.notes if result else {}).items():
                cases = notes.setdefault(key, {}).setdefault(value, [])
                if case.name not in cases:
                    cases.append(case.name)
    lines = []
    for key, values in notes.items():
        if len(values) == 1:
            lines.append(f"- {key}: {next(iter(values))}")
        else:
            lines += [f"- {key}, {', '.join(cases)}: {value}" for value, cases in values.items()]
    return "\n".join(lines) + "\n" if lines else ""


def main() -> int:
    """Write the page."""
    local(checkout() / "docs" / "quality.md").put_text(page(load_parts(), Results.default()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
