"""Disk use of a pipeline over many days, with `headrace gc --delete` after each and without.

    python -m bench.disk_use --days 60 --plot docs/disk_use.png

The days are those of bench.simulated_days: Delta tables, manifests and the registry are real, datasets and models are
files of sizes in proportion. After each day all files, and what tables' logs say of removals, are made a day older: a
day passes by the clock, too.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from statistics import linear_regression

from bench.simulated_days import day, let_a_day_pass, run_day
from headrace.config import Spec, load_spec
from headrace.jobs.housekeeping.collect import collect
from headrace.models import registry
from headrace.workspace import Workspace

#: What a training says of itself in the registry: numbers, and those of its steps.
METRICS = {"auc": 0.7, "logloss": 0.4, "calibration": 1.0, "hr_at_k": 0.2}
HISTORY = [{"step": step, "loss": 1 / (1 + step), "auc": 0.7} for step in range(10)]
#: What is kept: short enough for sixty days to show when it is full, and more days than lie between two checkpoints.
KEEP = {
    "models": 10,
    "logs": 10,
    "reports": 16,
    "manifests": 16,
    "compact_files": None,
    "tables": {"events": 16, "quarantine": 16, "scores": 14},
}
#: No run loads or reads older days than these tables keep.
READS = ("source.catch_up_days=7", "features.window_days=7")
#: The day by which everything is full: the logs of tables as long as the days that are kept have commits of their own,
#: one in which they came and one in which others went, and a week more, for which files stay for readers.
LEVEL = 44


def bytes_by_kind(home: Path) -> dict[str, int]:
    """Return bytes of the workspace's files by its folders; those of the lake by table and log."""
    sizes: Counter[str] = Counter()
    for file in home.rglob("*"):
        if file.is_file():
            parts = file.relative_to(home).parts
            of_table = "logs of tables" if "_delta_log" in parts else f"table {(*parts, '', '')[2]}"
            kind = of_table if parts[0] == "lake" else parts[0]
            sizes["registry" if kind.startswith("mlflow") else kind] += file.stat().st_size
    return dict(sizes)


def simulate(home: Path, spec: Spec, days: int, rows: int, collects: bool) -> list[dict[str, int]]:
    """Run days; return the bytes by kind after each day."""
    ws, history = Workspace(home), []
    for n in range(days):
        ds = day(n)
        run_day(ws, ds, rows)
        model = ws.model("clicks", ds, f"train-{ds}") / "model"
        registry.register(ws, "clicks", model, METRICS, f"train-{ds}", ds=ds, history=HISTORY)
        for _ in collect(spec, ws, datetime.now(UTC), delete=True) if collects else ():
            pass
        history.append(bytes_by_kind(home))
        if collects:  # nobody else asks how old a file is
            let_a_day_pass(home)
    return history


def slope(history: list[dict[str, int]], first: int) -> float:
    """Return bytes a day, by a line of least squares through the sums of the days from the `first` on (from 1)."""
    totals = [float(sum(f.values())) for f in history[first - 1 :]]
    return linear_regression(range(len(totals)), totals).slope


def _table(with_gc: list[dict[str, int]], without_gc: list[dict[str, int]]) -> str:
    kinds = sorted({k for f in with_gc for k in f})
    days_shown = [n for n in range(len(with_gc)) if n % 10 == 9 or n == 0]
    lines = ["| day | " + " | ".join(kinds) + " | all | without gc |", "|---" * (len(kinds) + 3) + "|"]
    for n in days_shown:
        cells = [f"{with_gc[n].get(k, 0) / 1024:,.0f}" for k in kinds]
        total, all_ = (sum(f[n].values()) / 1024 for f in (with_gc, without_gc))
        lines.append(f"| {n + 1} | " + " | ".join(cells) + f" | {total:,.0f} | {all_:,.0f} |")
    return "\n".join(lines)


def _plot(with_gc: list[dict[str, int]], without_gc: list[dict[str, int]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=130)
    kinds = sorted({k for f in with_gc for k in f}, key=lambda k: -max(f.get(k, 0) for f in with_gc))
    days = range(1, len(with_gc) + 1)
    axes.stackplot(
        days, [[f.get(k, 0) / 2**20 for f in with_gc] for k in kinds], labels=kinds, colors=plt.get_cmap("tab20").colors
    )
    axes.plot(days, [sum(f.values()) / 2**20 for f in without_gc], "k--", label="all, without gc")
    axes.set(xlabel="day", ylabel="MiB", xlim=(1, len(with_gc)), ylim=(0, None))
    axes.legend(loc="upper left", fontsize=7, ncols=2)
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    """Simulate, print the table, draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--days", type=int, default=60)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    spec = load_spec(
        "clicks", ["publish=null", *READS, *(f"housekeeping.{k}={json.dumps(v)}" for k, v in KEEP.items())]
    )
    with tempfile.TemporaryDirectory() as folder:
        with_gc, without_gc = (
            simulate(Path(folder) / name, spec, args.days, args.rows, name == "with") for name in ("with", "without")
        )
    print("KiB after each day\n")
    print(_table(with_gc, without_gc))
    if args.days > LEVEL + 1:
        totals = [sum(f.values()) / 1024 for f in with_gc]
        least, most = min(totals[LEVEL - 1 :]), max(totals[LEVEL - 1 :])
        print(
            f"\nday {LEVEL} to {args.days}: {least:,.0f} to {most:,.0f} KiB, by a straight line "
            f"{slope(with_gc, LEVEL):+,.0f} bytes a day; without gc {slope(without_gc, LEVEL):+,.0f}"
        )
    if args.plot:
        _plot(with_gc, without_gc, args.plot)


if __name__ == "__main__":
    main()
