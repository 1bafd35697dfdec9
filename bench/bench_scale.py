"""Many Criteo-shaped rows on one machine with little memory: checks, fit, transform, write, one epoch of training.

    make bench-scale                          # 3 and 10 million rows, held to 8 GiB (root)
    python -m bench.bench_scale 10 30 100     # millions of rows, each a part of its own
    python -m bench.bench_scale 30 --gib 4
    python -m bench.bench_scale 10 30 100 --resume   # only what this checkout has not measured yet

Rows of eight days lie in a folder of Parquet files, which is read where it is (`source.format: parquet`); the last day
validates. `headrace run` brings the day up to date to `train` in a control group of the kernel: all of headrace's
processes together, the JVM among them, have so much memory, the pages of files that they read and write included.
The workflow is that of bench-etl: 26 categories by categorify (min_count 15), 13 counts by fill_missing, clip, log,
normalize. The model is a DLRM (16 columns, MLPs 64-32) on two ranks, batches of 8,192.

- rows/s of each stage by its manifest; the floor is the rate of the smallest size that was measured: a ratio of 1 says
  that nothing grows faster than the rows.
- memory: what the processes hold (anonymous) at most, sampled; the floor is the smallest size's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path

import pyarrow.parquet as pq
import yaml

from bench.criteo_data import CATEGORIES, COUNTS, DAYS, DS, FIRST_DAY, MIN_COUNT, table_of_day
from bench.report import Figure, FigureParts, publish
from bench.usage import limited_memory, peak_of_tree
from headrace.config.workspace import Workspace
from headrace.stage.manifest import Manifest

_PARTS = FigureParts.named("scale")
_ROWS_PER_FILE = 500_000
_STAGES = ("ingest", "features", "train")
_OF_SIZE = " M rows: "


def measure(millions: float, gib: float) -> list[Figure]:
    """Measure one size."""
    work = _PARTS.folder / f"work-{millions:g}"
    shutil.rmtree(work, ignore_errors=True)
    rows = int(millions * 1e6)
    try:
        write_table(work / "table", rows)
        file = work / "scale.yaml"
        file.write_text(yaml.safe_dump(pipeline(work / "table")), encoding="utf-8")
        command = [sys.executable, "-m", "headrace.cli", "run", str(file), "--home", str(work / "home")]
        with limited_memory(gib) as group:
            process = subprocess.Popen([*command, "--ds", DS, "--to", "train"])
            try:
                group.add(process.pid)
                with peak_of_tree(process.pid) as peak:
                    code = process.wait()
            finally:
                process.kill()
                process.wait()
            killed, all_pages = group.killed, group.peak_mib
        if code or killed:
            raise RuntimeError(f"{millions:g} M rows: exit code {code}, {killed} processes killed for memory")
        stages = {stage: Manifest.load(Workspace(work / "home").manifest("scale", DS, stage)) for stage in _STAGES}
    finally:
        shutil.rmtree(work, ignore_errors=True)
    size = f"{millions:g}{_OF_SIZE}"
    figures = []
    for stage, manifest in stages.items():
        assert manifest is not None
        figures.append(Figure(f"{size}{stage}", rows / manifest.seconds, "rows/s"))
        if stage == "train":
            figures += [Figure(f"{size}peak of {rank}", mib, "MiB") for rank, mib in manifest.peak_memory_mib.items()]
            figures.append(Figure(f"{size}wait for rows", manifest.facts["data_wait_seconds"], "s"))
    figures.append(Figure(f"{size}held by all processes at most", peak.mib, "MiB"))
    figures.append(Figure(f"{size}of them no JVM", peak.python_mib, "MiB"))
    figures.append(Figure(f"{size}with pages of files, limit {gib:g} GiB", all_pages, "MiB"))
    return figures


def write_table(folder: Path, rows: int) -> None:
    """Write a folder a day, in files of half a million rows."""
    jobs = []
    for day in range(DAYS):
        of_day = rows * (day + 1) // DAYS - rows * day // DAYS
        ds = (FIRST_DAY + timedelta(days=day)).isoformat()
        (folder / f"ds={ds}").mkdir(parents=True)
        for k, start in enumerate(range(0, of_day, _ROWS_PER_FILE)):
            path = folder / f"ds={ds}" / f"part-{k:05}.parquet"
            jobs.append((path, min(_ROWS_PER_FILE, of_day - start), day, k))
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        for done, _ in enumerate(pool.map(_write_file, *zip(*jobs, strict=True))):
            print(f"generate: {done + 1} of {len(jobs)} files", end="\r", flush=True)
    print()


def _write_file(path: Path, rows: int, day: int, number: int) -> None:
    table = table_of_day(rows, day, seed=number + 1).drop_columns(["_source_file", "_source_line", "ds"])
    pq.write_table(table, path, compression="zstd")


def pipeline(table: Path) -> dict[str, object]:
    """Return the pipeline `scale`, as its YAML says it."""
    types = [("label", "int"), *((c, "int") for c in COUNTS), *((c, "string") for c in CATEGORIES), ("ts", "timestamp")]
    return {
        "pipeline": "scale",
        "source": {"format": "parquet", "path": str(table), "day": {"partition": "ds"}, "catch_up_days": DAYS - 1},
        "table": {"columns": [{"name": n, "type": t} for n, t in types], "event_time": "ts"},
        "features": {
            "label": "label",
            "split": {"by": "time", "valid_days": 1},
            "window_days": DAYS - 1,
            "workflow": [
                {"columns": list(COUNTS), "ops": ["fill_missing", {"clip": {"min": 0}}, "log", "normalize"]},
                {"columns": list(CATEGORIES), "ops": [{"categorify": {"min_count": MIN_COUNT}}]},
            ],
        },
        "model": {"kind": "dlrm", "embedding_dim": 16, "bottom_mlp": [64, 32], "top_mlp": [64, 32]},
        "train": {"ranks": 2, "batch_size": 8192, "streams": 4, "epochs": 1},
    }


def combined(parts: FigureParts = _PARTS) -> list[Figure]:
    """Return the figures of all sizes, each beside the smallest size's."""
    sizes = sorted(parts.measured(), key=float)
    smallest: dict[str, float] = {}
    figures = []
    for size in sizes:
        for f in parts.figures(size):
            floor = smallest.setdefault(f.name.split(_OF_SIZE)[1], f.value)
            figures.append(Figure(f.name, f.value, f.unit, floor=floor))
    return figures


if __name__ == "__main__":
    # So that groups and folders are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["3", "10"], help="millions of rows")
    parser.add_argument("--gib", type=float, default=8.0, help="memory of all processes")
    parser.add_argument("--resume", action="store_true", help="skip parts that this commit has measured")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_process:
        for part in args.parts:
            _PARTS.save(part, measure(float(part), args.gib))
    else:
        failures = _PARTS.run(args.parts, ["--gib", str(args.gib)], args.resume)
        publish("scale", combined())
        sys.exit(1 if failures else 0)
