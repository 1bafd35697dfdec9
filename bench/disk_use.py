"""Disk use of a pipeline over many days, with `headrace gc --delete` after each and without.

    python -m bench.disk_use --days 60 --plot docs/disk_use.png

The days are those of bench.simulated_days: Delta tables, manifests and the registry are real, datasets and models are
files of sizes in proportion, the clock is the machine's (so files that nothing names may go at once).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

from bench.simulated_days import day, run_day
from headrace import registry
from headrace.config import Spec, load_spec
from headrace.housekeeping.collect import collect
from headrace.workspace import Workspace

#: What is kept: short enough for sixty days to show when it is full.
KEEP = {
    "models": 14,
    "logs": 14,
    "reports": 30,
    "manifests": 40,
    "vacuum_hours": 0,
    "unfinished_days": 0,
    "compact_files": None,
    "tables": {"events": 40, "quarantine": 40, "scores": 30},
}


def bytes_by_kind(home: Path) -> dict[str, int]:
    """Bytes of the workspace's files by its folders; those of the lake by table and log."""
    found: Counter[str] = Counter()
    for file in home.rglob("*"):
        if file.is_file():
            parts = file.relative_to(home).parts
            of_table = "logs of tables" if "_delta_log" in parts else f"table {(*parts, '', '')[2]}"
            kind = of_table if parts[0] == "lake" else parts[0]
            found["registry" if kind.startswith("mlflow") else kind] += file.stat().st_size
    return dict(found)


def simulate(home: Path, spec: Spec, days: int, rows: int, collects: bool) -> list[dict[str, int]]:
    """Bytes by kind after each day."""
    ws, found = Workspace(home), []
    for n in range(days):
        ds = day(n)
        run_day(ws, ds, rows)
        registry.register(ws, "clicks", ws.model("clicks", ds, f"train-{ds}") / "model", {}, f"train-{ds}", ds=ds)
        for _ in collect(spec, ws, datetime.now(UTC) + timedelta(hours=1), delete=True) if collects else ():
            pass
        found.append(bytes_by_kind(home))
    return found


def _table(found: list[dict[str, int]], without: list[dict[str, int]]) -> str:
    kinds = sorted({k for f in found for k in f})
    shown = [n for n in range(len(found)) if n % 10 == 9 or n == 0]
    lines = ["| day | " + " | ".join(kinds) + " | all | without gc |", "|---" * (len(kinds) + 3) + "|"]
    for n in shown:
        cells = [f"{found[n].get(k, 0) / 1024:,.0f}" for k in kinds]
        total, all_ = (sum(f[n].values()) / 1024 for f in (found, without))
        lines.append(f"| {n + 1} | " + " | ".join(cells) + f" | {total:,.0f} | {all_:,.0f} |")
    return "\n".join(lines)


def _plot(found: list[dict[str, int]], without: list[dict[str, int]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=130)
    kinds = sorted({k for f in found for k in f}, key=lambda k: -max(f.get(k, 0) for f in found))
    at = range(1, len(found) + 1)
    axes.stackplot(at, [[f.get(k, 0) / 2**20 for f in found] for k in kinds], labels=kinds)
    axes.plot(at, [sum(f.values()) / 2**20 for f in without], "k--", label="all, without gc")
    axes.set(xlabel="day", ylabel="MiB", xlim=(1, len(found)), ylim=(0, None))
    axes.legend(loc="upper left", fontsize=7, ncols=2)
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    """Simulate, print the table, draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--days", type=int, default=60)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    spec = load_spec("clicks", ["publish=null", *(f"housekeeping.{k}={json.dumps(v)}" for k, v in KEEP.items())])
    with tempfile.TemporaryDirectory() as folder:
        found, without = (
            simulate(Path(folder) / name, spec, given.days, given.rows, name == "with") for name in ("with", "without")
        )
    print("KiB after each day\n")
    print(_table(found, without))
    if given.plot:
        _plot(found, without, given.plot)


if __name__ == "__main__":
    main()
