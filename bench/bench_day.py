"""How each stage's time and memory grow with the log, and what one application for the day's stages saves.

    make bench-day                           # days of 1 M, 2 M and 4 M generated rows
    python -m bench.bench_day 0.1 0.2        # millions of rows

Each size is run in one application, and with an application for each stage (`headrace run --isolated`), over the same
landing files. The peer of a stage's seconds is the smallest size's, scaled by rows: a ratio below 1 means better than
linear. The peer of the syncs, with which a stage's results are on the disk before its manifest is, is 5 % of the day.
The peer of the whole day, from `headrace run` to its end, is the isolated day.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.report import Figure, publish
from headrace.config import load_spec
from headrace.generate import days_between
from headrace.manifest import Manifest
from headrace.stages import ORDER
from headrace.workspace import Workspace

DAYS = 8
DS = "2026-01-08"
#: The share of a day that waiting for the disk may take.
MOST_SYNCED = 0.05


@dataclass(frozen=True)
class Day:
    """A day that was run: its stages' manifests, and the seconds of the whole command."""

    manifests: dict[str, Manifest]
    seconds: float


def measure(millions: float) -> tuple[Day, Day]:
    """Generate a log, and run its day in a home of its own, twice: in one application, and isolated."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    try:
        overrides = ["--set", f"generate.rows_per_day={int(millions * 1e6 / DAYS)}"]
        _headrace("generate", "clicks", "--home", str(folder / "shared"), "--until", DS, *overrides)
        shutil.copytree(folder / "shared" / "landing", folder / "isolated" / "landing")
        return _run(folder / "shared", overrides), _run(folder / "isolated", [*overrides, "--isolated"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(home: Path, arguments: Sequence[str]) -> Day:
    ws = Workspace(home)
    try:
        tick = time.perf_counter()
        _headrace("run", "clicks", "--home", str(home), "--ds", DS, *arguments)
        seconds = time.perf_counter() - tick
    finally:
        _headrace("warehouse", "stop", "--home", str(home), check=False)
    found = {stage: Manifest.load(ws.manifest("clicks", DS, stage)) for stage in ORDER}
    return Day({stage: m for stage, m in found.items() if m is not None}, seconds)


def _headrace(*arguments: str, check: bool = True) -> None:
    subprocess.run([sys.executable, "-m", "headrace.cli", *arguments], check=check)


def main(sizes: list[float]) -> None:
    """Measure all sizes, one after the other."""
    assert len(days_between(load_spec("clicks").generate.start, DS)) == DAYS  # type: ignore[union-attr]
    figures: list[Figure] = []
    smallest: dict[str, float] = {}
    for size in sorted(sizes):
        shared, isolated = measure(size)
        for stage, manifest in shared.manifests.items():
            first = smallest.setdefault(stage, manifest.seconds)
            alone = isolated.manifests[stage]
            figures += [
                Figure(f"{stage} {size:g} M rows", manifest.seconds, "s", peer=first * size / min(sizes)),
                Figure(f"{stage} {size:g} M rows, isolated", alone.seconds, "s"),
            ]
            figures += [
                Figure(f"{stage} {size:g} M rows, peak memory of {process}", mib, "MiB")
                for process, mib in manifest.peak_memory_mib.items()
            ]
            # Of an application that train begins (headrace.train.launch.startup); the floor of each phase is the whole.
            start = alone.facts.get("startup_seconds", {})
            figures += [
                Figure(f"{stage} {size:g} M rows, isolated, start: {part.replace('_', ' ')}", s, "s", start["total"])
                for part, s in start.items()
                if part != "total"
            ]
        figures.append(Figure(f"day {size:g} M rows", shared.seconds, "s", peer=isolated.seconds))
        # 5 % of the day is what waiting for the disk may take (docs/storage.md).
        figures.append(Figure(f"day {size:g} M rows, syncs", synced(shared), "s", peer=shared.seconds * MOST_SYNCED))
        print(table(size, shared, isolated))
    publish("day", figures)


def synced(day: Day) -> float:
    """Return the seconds that the stages' own processes waited for files to be on the disk."""
    return sum(m.sync_seconds or 0.0 for m in day.manifests.values())


def table(size: float, shared: Day, isolated: Day) -> str:
    """The seconds of a day's stages, in one application and in one each; `between`: starts and ends of applications."""
    lines = [f"{size:g} M rows  one application  isolated"]
    for stage, manifest in shared.manifests.items():
        lines.append(f"{stage:<10}{manifest.seconds:>15.1f} s{isolated.manifests[stage].seconds:>8.1f} s")
    starts = [day.seconds - sum(m.seconds for m in day.manifests.values()) for day in (shared, isolated)]
    lines.append(f"{'between':<10}{starts[0]:>15.1f} s{starts[1]:>8.1f} s")
    lines.append(f"{'syncs':<10}{synced(shared):>15.1f} s{synced(isolated):>8.1f} s")
    lines.append(f"{'day':<10}{shared.seconds:>15.1f} s{isolated.seconds:>8.1f} s")
    return "\n".join(lines)


if __name__ == "__main__":
    main([float(a) for a in sys.argv[1:]] or [1.0, 2.0, 4.0])
