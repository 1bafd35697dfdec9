"""Features where hosts share no scratch folder (spark.scratch: own), beside the way with a folder in common.

    python -m bench.bench_scratch rows 2         # millions of Criteo-shaped rows, shared and own in turns, three times
    python -m bench.bench_scratch ids 1 10 100   # the driver's memory with so many million distinct ids
    python -m bench.bench_scratch keys 1 4       # the same with tables by key (join_groupby, target_encoding)

`rows` runs both in one session of local[*] over the same files, nothing decoded before; the datasets are compared byte
by byte. `ids` and `keys` run `own` on an executor of its own (local-cluster), with a driver whose heap is 512 MiB or
what --heap says, `driver_python_mib: 256`, and a row for each id. Writes build/bench/scratch-PART-SIZE.json.
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

from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from bench.criteo_data import DAYS, FIRST_DAY, Lake, spec_of, write_days
from bench.report import Figure, publish
from headrace.config import Chain, Spark, Spec
from headrace.config.workspace import Workspace
from headrace.lake.spark.session import session

_TURNS = 3
_HEAP = "512m"
#: The least that a spec may give: two million ids are more than the driver takes.
_PYTHON_MIB = 256
_BY_KEY = (
    Chain(columns=("C1",), ops=({"op": "target_encoding"},)),
    Chain(columns=("C1",), ops=({"op": "join_groupby", "params": {"by": "C1"}},)),
)


def with_scratch(spec: Spec, scratch: str) -> Spec:
    """Return the pipeline with that kind of scratch."""
    return spec.model_copy(update={"spark": spec.spark.model_copy(update={"scratch": scratch})})


def digest(folder: Path) -> str:
    """Return the SHA-256 of all files and their names."""
    sha = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        sha.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return sha.hexdigest()


def of_rows(millions: float, work: Path) -> list[Figure]:
    """Measure rows a second of both ways."""
    rows = int(millions * 1e6)
    with session(Spark(), Workspace(work), "bench-scratch") as spark:
        warm = Lake(spark, work / "warm", write_days(work / "warm" / "raw", 40_000, DAYS), 40_000)
        for scratch in ("shared", "own"):
            warm.features(with_scratch(spec_of(), scratch), work / "warm" / scratch)
        lake = Lake(spark, work / "lake", write_days(work / "raw", rows, DAYS), rows)
        shutil.rmtree(work / "raw")
        rates: dict[str, list[float]] = {"shared": [], "own": []}
        for repeat in range(1, _TURNS + 1):
            digests = set()
            for scratch, rows_per_second in rates.items():
                fit, write, _ = lake.features(with_scratch(spec_of(), scratch), work / "out")
                rows_per_second.append(rows / (fit + write))
                digests.add(digest(work / "out"))
                forget(lake, work)
                shutil.rmtree(work / "out")
            assert len(digests) == 1, "the datasets differ"
            print(f"turn {repeat}: own {rates['own'][-1]:,.0f}, shared {rates['shared'][-1]:,.0f} rows/s", flush=True)
    own_rate, shared_rate = (median(rates[s]) for s in ("own", "shared"))
    ratio = median(a / b for a, b in zip(rates["own"], rates["shared"], strict=True))
    size = f"{millions:g} M rows"
    return [
        Figure(f"own, {size}", own_rate, "rows/s", peer=shared_rate),
        Figure(f"own by shared, {size}", ratio, "times as fast"),
    ]


def forget(lake: Lake, work: Path) -> None:
    """Remove what was decoded, wherever it is."""
    for folder in (lake.ws.encoded("etl").local_path(), *(work / "spark" / "local").glob("*/encoded")):
        shutil.rmtree(folder, ignore_errors=True)


def of_ids(millions: float, work: Path, part: str = "ids", heap: str = _HEAP) -> list[Figure]:
    """Measure peaks of the driver's two processes: with a vocabulary of so many values, or (`keys`) tables of so many
    keys.
    """
    rows = int(millions * 1e6)
    conf = Spark(
        master="local-cluster[1,2,2048]",
        scratch="own",
        driver_memory=heap,
        driver_python_mib=_PYTHON_MIB,
        properties={
            "spark.executor.memory": "2g",
            # A sort in a task is of about a million values.
            "spark.sql.shuffle.partitions": str(max(8, rows // 1_000_000)),
            # The disk of this machine is small.
            "spark.io.compression.codec": "zstd",
        },
    )
    spec = spec_of(("C1",), (), 1)
    features = spec.features if part == "ids" else spec.features.model_copy(update={"workflow": _BY_KEY})
    spec = spec.model_copy(update={"spark": conf, "features": features})
    with session(conf, Workspace(work), "bench-ids") as spark:
        lake = Lake(spark, work / "lake", rows_of_ids(spark, rows), rows)
        Path("/proc/self/clear_refs").write_text("5")  # peaks begin anew
        start_mib = peak_mib(os.getpid())
        fit, write, fitted = lake.features(spec, work / "out")
        trained = rows - rows // DAYS
        if part == "ids":
            assert len(fitted.vocabularies["C1"]) == trained, "each id of the training days has a code"
        else:
            assert [len(t) for t in fitted.tables.values()] == [trained] * 2, "each id of the training days is a key"
        gateway = SparkContext._gateway
        assert gateway is not None
        python, jvm = peak_mib(os.getpid()), peak_mib(gateway.proc.pid)
    size = f"{millions:g} M {part}"
    return [
        Figure(f"driver's Python, {size}", python, "MiB", peer=start_mib),
        Figure(f"driver's JVM, {size}", jvm, "MiB"),
        Figure(f"fit, {size}", fit, "s"),
        Figure(f"fit, transform and write, {size}", rows / (fit + write), "rows/s"),
    ]


def rows_of_ids(spark: SparkSession, rows: int) -> DataFrame:
    """Write days of rows with an id each, none twice and in no order: a file a day."""
    # Of an odd factor's products modulo a power of two none is twice.
    bits = (rows - 1).bit_length()
    odd = 0x9E3779B1 % (1 << bits) | 1
    day = F.spark_partition_id()
    ds = F.date_add(F.lit(FIRST_DAY).cast("date"), day)
    return spark.range(0, rows, 1, DAYS).select(
        (F.col("id") % 2).cast("int").alias("label"),
        ((F.col("id") * odd) % (1 << bits)).cast("string").alias("C1"),
        ds.cast("timestamp").alias("ts"),
        F.concat(ds.cast("string"), F.lit(".txt")).alias("_source_file"),
        F.col("id").alias("_source_line"),
        ds.cast("string").alias("ds"),
    )


def peak_mib(process: int) -> float:
    """Return the largest resident memory of a process so far, in MiB."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("rows", "ids", "keys"))
    parser.add_argument("millions", nargs="+", type=float)
    parser.add_argument("--heap", default=_HEAP, help="of the driver's JVM, for ids and keys")
    args = parser.parse_args()
    if len(args.millions) > 1:
        # Peaks are a process's: each size has its own.
        for millions in args.millions:
            line = [sys.executable, "-m", "bench.bench_scratch", args.part, str(millions), "--heap", args.heap]
            subprocess.run(line, check=True)
        sys.exit(0)
    (size,) = args.millions
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        folder = Path(name)
        figures = of_rows(size, folder) if args.part == "rows" else of_ids(size, folder, args.part, args.heap)
    publish(f"scratch-{args.part}-{size:g}", figures)
    for figure in figures:
        print(figure)
