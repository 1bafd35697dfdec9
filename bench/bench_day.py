"""Growth of each stage's time and memory with the log, and what one application for the day's stages saves.

    make bench-day                           # days of 1 M, 2 M and 4 M generated rows
    python -m bench.bench_day 0.1 0.2        # millions of rows

Each size is run in one application, and with an application for each stage (`headrace run --isolated`), over the same
landing files. The peer of a stage's seconds is the smallest size's, scaled by rows: a ratio below 1 means better than
linear. The peer of the syncs, with which a stage's results are on the disk before its manifest is, is 5 % of the day.
The peer of the whole day, from `headrace run` to its end, is the isolated day.

Syncs are measured in two ways: each stage adds up how long its own process waits for them, and pairs of days of the
smallest size run with syncs and without any (PostgreSQL's and SQLite's own, too), in turn first and second.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.report import Figure, publish
from headrace.config import load_spec
from headrace.config.installation import checkout
from headrace.config.stages import ORDER
from headrace.config.workspace import Workspace
from headrace.lake.generate import days_between
from headrace.stage.manifest import Manifest

DAYS = 8
DS = "2026-01-08"
#: The share of a day that waiting for the disk may take.
MOST_SYNCED = 0.05
#: Pairs of days with syncs and without.
PAIRS = 3
#: Preloaded into a day without syncs (native/cpp/no_syncs.cpp).
NO_SYNCS = checkout() / "build" / "native" / "libno_syncs.so"


@dataclass(frozen=True)
class DayRun:
    """A day that was run: its stages' manifests, and the seconds of the whole command."""

    manifests: dict[str, Manifest]
    seconds: float


def measure(millions: float) -> tuple[DayRun, DayRun]:
    """Generate a log, and run its day in a home of its own, twice: in one application, and isolated."""
    with _generated(millions) as (folder, overrides):
        shutil.copytree(folder / "shared" / "landing", folder / "isolated" / "landing")
        return _run(folder / "shared", overrides), _run(folder / "isolated", [*overrides, "--isolated"])


def measure_pairs(millions: float, pairs: int) -> list[tuple[float, float]]:
    """Generate a log, and run its day in new homes; return for each pair the seconds with syncs and without."""
    measured = []
    with _generated(millions) as (folder, overrides):
        for number in range(2 * pairs):
            home = folder / str(number)
            shutil.copytree(folder / "shared" / "landing", home / "landing")
            # The first of a pair finds other caches than the second: with and without take turns.
            syncs = number % 4 in (0, 3)
            measured.append((number // 2, syncs, _run(home, overrides, syncs).seconds))
            shutil.rmtree(home)
    return [
        (
            next(s for n, syncs, s in measured if n == pair and syncs),
            next(s for n, y, s in measured if n == pair and not y),
        )
        for pair in range(pairs)
    ]


@contextmanager
def _generated(millions: float) -> Iterator[tuple[Path, list[str]]]:
    """Yield a folder with landing files in the home `shared`, and the overrides of runs; the folder goes at the end."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    try:
        overrides = ["--set", f"generate.rows_per_day={int(millions * 1e6 / DAYS)}"]
        _headrace("generate", "clicks", "--home", str(folder / "shared"), "--until", DS, *overrides)
        yield folder, overrides
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(home: Path, arguments: Sequence[str], syncs: bool = True) -> DayRun:
    ws = Workspace(home)
    try:
        tick = time.perf_counter()
        _headrace("run", "clicks", "--home", str(home), "--ds", DS, *arguments, syncs=syncs)
        seconds = time.perf_counter() - tick
    finally:
        _headrace("warehouse", "stop", "--home", str(home), check=False)
    manifests = {stage: Manifest.load(ws.manifest("clicks", DS, stage)) for stage in ORDER}
    return DayRun({stage: m for stage, m in manifests.items() if m is not None}, seconds)


def _headrace(*arguments: str, check: bool = True, syncs: bool = True) -> None:
    environment = dict(os.environ) if syncs else without_syncs()
    subprocess.run([sys.executable, "-m", "headrace.cli", *arguments], check=check, env=environment)


def without_syncs() -> dict[str, str]:
    """Return the environment of programs whose syncs return at once.

    Raises:
        FileNotFoundError: the library is not built (`make native`; on Linux alone).
    """
    if not NO_SYNCS.is_file():
        raise FileNotFoundError(f"{NO_SYNCS} is not built: make native")
    return {**os.environ, "LD_PRELOAD": " ".join(filter(None, (str(NO_SYNCS), os.environ.get("LD_PRELOAD"))))}


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
            # Of an application that train begins (headrace.train.job); the floor of each phase is the whole.
            start = alone.facts.get("startup_seconds", {})
            figures += [
                Figure(f"{stage} {size:g} M rows, isolated, start: {part.replace('_', ' ')}", s, "s", start["total"])
                for part, s in start.items()
                if part != "total"
            ]
        figures.append(Figure(f"day {size:g} M rows", shared.seconds, "s", peer=isolated.seconds))
        # 5 % of the day is what waiting for the disk may take (docs/power-cuts.md).
        figures.append(Figure(f"day {size:g} M rows, syncs", synced(shared), "s", peer=shared.seconds * MOST_SYNCED))
        print(table(size, shared, isolated))
    figures += of_pairs(min(sizes), measure_pairs(min(sizes), PAIRS))
    publish("day", figures)


def of_pairs(size: float, pairs: Sequence[tuple[float, float]]) -> list[Figure]:
    """Return the day's seconds with syncs beside those without, and what syncs take beside 5 % of the day: medians."""
    day = statistics.median(with_syncs for with_syncs, _ in pairs)
    unsynced = statistics.median(seconds for _, seconds in pairs)
    cost = statistics.median(with_syncs - seconds for with_syncs, seconds in pairs)
    return [
        Figure(f"day {size:g} M rows, of {len(pairs)} pairs, peer without syncs", day, "s", peer=unsynced),
        Figure(f"day {size:g} M rows, syncs of {len(pairs)} pairs", cost, "s", peer=day * MOST_SYNCED),
    ]


def synced(day: DayRun) -> float:
    """Return the seconds that the stages' own processes waited for files to be on the disk."""
    return sum(m.sync_seconds or 0.0 for m in day.manifests.values())


def table(size: float, shared: DayRun, isolated: DayRun) -> str:
    """Return a table of the seconds of a day's stages, in one application and in one each; `between`: starts and ends
    of applications.
    """
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
