"""Features where hosts share no scratch folder (spark.scratch: own), beside the way with a folder in common.

    python -m bench.bench_scratch rows 2         # millions of Criteo-shaped rows, shared and own in turns, three times
    python -m bench.bench_scratch ids 1 4 10     # the driver's memory with so many million distinct ids

`rows` runs both in one session of local[*] over the same files, nothing decoded before; the datasets are compared byte
by byte. `ids` runs `own` on an executor of its own (local-cluster), with a driver whose heap is 512 MiB, and a row for
each id. Writes build/bench/scratch-PART-SIZE.json.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import SparkContext

from bench.criteo_data import FIRST_DAY, write_days
from bench.etl_lake import DAYS, Lake, spec_of
from bench.report import Figure, publish
from headrace.config import Spark, Spec
from headrace.features.vocabulary import delta_table
from headrace.lake.session import session
from headrace.workspace import Workspace

_TURNS = 3
_HEAP = "512m"
#: Above so many values the driver takes none: the same way for all sizes.
_MOST_IN_DRIVER = 100_000


def with_scratch(spec: Spec, scratch: str) -> Spec:
    """The pipeline with that setting."""
    return spec.model_copy(update={"spark": spec.spark.model_copy(update={"scratch": scratch})})


def digest(folder: Path) -> str:
    """Of all files and their names."""
    found = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        found.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def of_rows(millions: float, work: Path) -> list[Figure]:
    """Rows a second of both ways."""
    rows = int(millions * 1e6)
    with session(Spark(), Workspace(work), "bench-scratch") as spark:
        warm = Lake(spark, work / "warm", write_days(work / "warm" / "raw", 40_000, DAYS), 40_000)
        for scratch in ("shared", "own"):
            warm.features(with_scratch(spec_of(), scratch), work / "warm" / scratch)
        lake = Lake(spark, work / "lake", write_days(work / "raw", rows, DAYS), rows)
        shutil.rmtree(work / "raw")
        rates: dict[str, list[float]] = {"shared": [], "own": []}
        for turn in range(1, _TURNS + 1):
            digests = set()
            for scratch, found in rates.items():
                fit, write, _ = lake.features(with_scratch(spec_of(), scratch), work / "out")
                found.append(rows / (fit + write))
                digests.add(digest(work / "out"))
                forget(lake, work)
                shutil.rmtree(work / "out")
            assert len(digests) == 1, "the datasets differ"
            print(f"turn {turn}: own {rates['own'][-1]:,.0f}, shared {rates['shared'][-1]:,.0f} rows/s", flush=True)
    own, shared = (median(rates[s]) for s in ("own", "shared"))
    ratio = median(a / b for a, b in zip(rates["own"], rates["shared"], strict=True))
    at = f"{millions:g} M rows"
    return [Figure(f"own, {at}", own, "rows/s", peer=shared), Figure(f"own by shared, {at}", ratio, "times as fast")]


def forget(lake: Lake, work: Path) -> None:
    """Remove what was decoded, wherever it is."""
    for folder in (lake.ws.encoded("etl").local_path(), *(work / "spark" / "local").glob("*/encoded")):
        shutil.rmtree(folder, ignore_errors=True)


def of_ids(millions: float, work: Path) -> list[Figure]:
    """Peaks of the driver's two processes."""
    rows = int(millions * 1e6)
    delta_table.MOST_IN_DRIVER = _MOST_IN_DRIVER
    conf = Spark(
        master="local-cluster[1,2,2048]",
        scratch="own",
        driver_memory=_HEAP,
        properties={"spark.executor.memory": "2g", "spark.sql.shuffle.partitions": "8"},
    )
    spec = spec_of(("C1",), (), 1)
    spec = spec.model_copy(update={"spark": conf})
    with session(conf, Workspace(work), "bench-ids") as spark:
        lake = Lake(spark, work / "lake", days_of_ids(work / "raw", rows), rows)
        shutil.rmtree(work / "raw")
        Path("/proc/self/clear_refs").write_text("5")  # peaks begin anew
        before = peak_mib(os.getpid())
        fit, write, fitted = lake.features(spec, work / "out")
        assert len(fitted.vocabularies["C1"]) == rows - rows // DAYS, "each id of the training days has a code"
        gateway = SparkContext._gateway
        assert gateway is not None
        python, jvm = peak_mib(os.getpid()), peak_mib(gateway.proc.pid)
    at = f"{millions:g} M ids"
    return [
        Figure(f"driver's Python, {at}", python, "MiB", peer=before),
        Figure(f"driver's JVM, {at}", jvm, "MiB"),
        Figure(f"fit, transform and write, {at}", rows / (fit + write), "rows/s"),
    ]


def days_of_ids(folder: Path, rows: int) -> list[Path]:
    """Days of rows with an id each, none twice, a file each; written a day at a time."""
    folder.mkdir(parents=True)
    paths = []
    for day in range(DAYS):
        start, end = rows * day // DAYS, rows * (day + 1) // DAYS
        n, ds = end - start, np.datetime64(FIRST_DAY) + day
        # An odd factor: all different, and in no order.
        ids = (np.arange(start, end, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
        columns = {
            "label": pa.array(np.arange(n) % 2, pa.int32()),
            "C1": pa.array(ids).cast(pa.string()),
            "ts": pa.array(np.full(n, ds.astype("datetime64[us]"))).cast(pa.timestamp("us", tz="UTC")),
            "_source_file": pa.array([f"{ds}.txt"] * n),
            "_source_line": pa.array(np.arange(n)),
            "ds": pa.array([str(ds)] * n),
        }
        paths.append(folder / f"{day}.parquet")
        pq.write_table(pa.table(columns), paths[-1])
        del columns
    return paths


def peak_mib(process: int) -> float:
    """What a process had resident at most."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("rows", "ids"))
    parser.add_argument("millions", nargs="+", type=float)
    given = parser.parse_args()
    if len(given.millions) > 1:
        # Peaks are a process's: each size has its own.
        for one in given.millions:
            line = [sys.executable, "-m", "bench.bench_scratch", given.part, str(one)]
            subprocess.run(line, check=True)
        sys.exit(0)
    figures = []
    for one in given.millions:
        with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
            figures += (of_rows if given.part == "rows" else of_ids)(one, Path(name))
    publish(f"scratch-{given.part}-{given.millions[0]:g}", figures)
    for figure in figures:
        print(figure)
