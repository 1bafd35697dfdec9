"""How each stage's time and memory grow with the log: whole days of 1, 2 and 4 million generated rows.

    make bench-day                           # 1 M, 2 M, 4 M
    python -m bench.bench_day 0.1 0.2        # millions of rows

The peer of a size's seconds is the smallest size's, scaled by rows: a ratio below 1 means better than linear.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.report import Figure, publish
from headrace.config import load_spec
from headrace.generate import days_between
from headrace.manifest import Manifest
from headrace.stages import ORDER
from headrace.workspace import Workspace

DAYS = 8
DS = "2026-01-08"


def measure(millions: float) -> dict[str, Manifest]:
    """Generate and run one whole day in a folder of its own; the stages' manifests by name."""
    home = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    try:
        overrides = ["--set", f"generate.rows_per_day={int(millions * 1e6 / DAYS)}"]
        base = [sys.executable, "-m", "headrace.cli"]
        subprocess.run([*base, "generate", "clicks", "--home", str(home), "--until", DS, *overrides], check=True)
        subprocess.run([*base, "run", "clicks", "--home", str(home), "--ds", DS, *overrides], check=True)
        ws = Workspace(home)
        found = {stage: Manifest.load(ws.manifest("clicks", DS, stage)) for stage in ORDER}
        return {stage: m for stage, m in found.items() if m is not None}
    finally:
        subprocess.run([sys.executable, "-m", "headrace.cli", "warehouse", "stop", "--home", str(home)], check=False)
        shutil.rmtree(home, ignore_errors=True)


def main(sizes: list[float]) -> None:
    """Measure all sizes, one after the other."""
    assert len(days_between(load_spec("clicks").generate.start, DS)) == DAYS  # type: ignore[union-attr]
    figures: list[Figure] = []
    smallest: dict[str, float] = {}
    for size in sorted(sizes):
        for stage, manifest in measure(size).items():
            first = smallest.setdefault(stage, manifest.seconds)
            figures.append(Figure(f"{stage} {size:g} M rows", manifest.seconds, "s", peer=first * size / min(sizes)))
            figures += [
                Figure(f"{stage} {size:g} M rows, peak memory of {process}", mib, "MiB")
                for process, mib in manifest.peak_memory_mib.items()
            ]
            # From spark-submit to the first step (headrace.train.launch.startup); the floor of each part is the whole.
            start = manifest.facts.get("startup_seconds", {})
            figures += [
                Figure(f"{stage} {size:g} M rows, start: {part.replace('_', ' ')}", seconds, "s", start["total"])
                for part, seconds in start.items()
                if part != "total"
            ]
    publish("day", figures)


if __name__ == "__main__":
    main([float(a) for a in sys.argv[1:]] or [1.0, 2.0, 4.0])
