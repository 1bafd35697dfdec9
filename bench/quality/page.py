"""docs/quality.md from the results that are there: `python -m bench.quality.page`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from bench.quality.part import QualityPart, load_parts
from bench.quality.results import Results
from bench.quality.table import COLUMNS, Line, lines_of
from headrace.storage import local
from headrace.workspace import checkout

SEEDS = (1, 2, 3)

_HEAD = """# Quality

    make quality                               # all parts and seeds 1, 2, 3: an hour or two on 2 cores
    make quality PARTS=beauty,adult SEEDS=1,2  # some
    python -m bench.quality.page               # writes this page from the results

Models of the pipelines in `conf/pipelines`, trained on splits that papers report on, and on generated clicks whose best
AUC is known.

Each case runs the product as a user would: landing files, lake, features, training and evaluation over all ranks.
Training is `headrace train` on Horovod's ranks, or `headrace baseline` for XGBoost.

- The data sets are not shipped. `make quality` skips a part whose folder in `../shared/data` is missing, and says so.
- A finished case and seed is a file in `build/quality/results`. It is valid while the case's settings are the same, so
  the same command resumes where it was stopped.
- `build/quality/quality.json` has all figures.
- `bench/quality/__init__.py` says how to write a part.

How to read the tables:

| column | meaning |
| --- | --- |
| mean | the mean over the seeds. A seed decides initial weights, the order of batches and negatives, never the split |
| sd | the standard deviation over the seeds (divisor n − 1) |
| floor, aim | what the case is to reach |
| seconds | those of the stage: start of Spark and of the ranks, training, evaluation |
| peak MiB | peak memory of all processes of the stage, including the JVM: the greatest of the seeds |
| 95 % interval | bootstrap of the first seed |

The figures were made with `QUALITY_ARGS="--ranks 1 --threads 1"`, at a low priority beside other work. A quiet machine
takes a half or a third of these seconds. Ranks and threads change a metric only by the rounding of sums.
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
        sections.append(_table(lines) if lines else "No results yet.\n")
        if part.published:
            sections.append(_published(part))
        if notes := _notes(name, part, results, seeds):
            sections.append(notes)
    return "\n".join(sections)


def _table(lines: Sequence[Line]) -> str:
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
