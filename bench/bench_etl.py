"""Features of Criteo-shaped rows: the Arrow engine's fit, transform and write beside its floors and its peers.

    make bench-etl                               # 1 and 2 million rows, all peers
    python -m bench.bench_etl 2 4 8              # millions of rows
    python -m bench.bench_etl 2 --peers none     # or nvtabular, textbook, nvtabular,textbook

Workflow: 26 categories by categorify (min_count 15), 13 counts by fill_missing, clip, log, normalize; eight days in a
Delta table, the last validates. Figures are rows a second over all rows (the higher the better) unless they say MiB or
values, of the best of three tries (of NVTabular, of its two schedulers). Floor: a plain Spark copy of the same files,
in the same session. Peer: as named. A peer that is not there is left out, with the reason.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from bench.criteo_data import CATEGORIES, COUNTS, hexadecimal, write_days
from bench.memory import peak_of_tree
from bench.peers.etl_textbook import textbook
from bench.report import Figure, publish
from headrace.atomic import new_directory
from headrace.config import Spec, build_spec, load_spec
from headrace.features.lake_files.from_files import files_of_day, fit_files
from headrace.features.rows.split import split_rows
from headrace.features.stage import BuildFeatures
from headrace.features.vocabulary import VocabularyTable
from headrace.features.workflow import FittedWorkflow, Workflow
from headrace.features.writing.encoded import write_encoded
from headrace.features.writing.files import plan_files
from headrace.lake.ingest import Ingest
from headrace.lake.log import DataFile, DeltaLog
from headrace.lake.session import session
from headrace.stage import run_stage
from headrace.workspace import Workspace, checkout

DAYS = 8
DS = "2026-01-08"
MIN_COUNT = 15
#: Of the copy and of ours each; the best counts, as of NVTabular's two schedulers.
REPEATS = 3
PEERS = ("nvtabular", "textbook")
NVTABULAR = checkout() / "build" / "peers" / "nvtabular" / "bin" / "python"
_META = "_source_file string, _source_line bigint, ds string"


def spec_of(categories: tuple[str, ...] = CATEGORIES, counts: tuple[str, ...] = COUNTS, least: int = MIN_COUNT) -> Spec:
    """The pipeline."""
    numbers = {"columns": list(counts), "ops": ["fill_missing", {"clip": {"min": 0}}, "log", "normalize"]}
    codes = {"columns": list(categories), "ops": [{"categorify": {"min_count": least}}]}
    types = [("label", "int"), *((c, "int") for c in counts), *((c, "string") for c in categories), ("ts", "timestamp")]
    return build_spec(
        {
            "pipeline": "etl",
            "source": {"format": "csv", "path": "landing/{ds}/*.csv"},
            "table": {"columns": [{"name": n, "type": t} for n, t in types], "event_time": "ts"},
            "features": {
                "label": "label",
                "split": {"by": "time", "valid_days": 1},
                "window_days": DAYS - 1,
                "workflow": [*([numbers] if counts else []), codes],
            },
        }
    )


class Lake:
    """A Delta table of generated rows in a workspace of its own."""

    def __init__(self, spark: SparkSession, folder: Path, raw: list[Path], rows: int) -> None:
        self.ws, self.rows, self._spark = Workspace(folder / "home"), rows, spark
        self.table = self.ws.table("etl", "events")
        frame = spark.read.parquet(*map(str, raw))
        frame.write.format("delta").partitionBy("ds").save(str(self.table))

    @property
    def files(self) -> list[DataFile]:
        found = DeltaLog(self.table).files(0)
        assert found is not None
        return found

    def paths(self, valid: bool) -> list[str]:
        """Data files of the last day, or of those before."""
        return [str(f.path) for f in self.files if (f.partition["ds"] == DS) == valid]

    def features(self, spec: Spec, out: Path) -> tuple[float, float, FittedWorkflow]:
        """(seconds of fit, seconds of transform and write, what was learned) of the Arrow engine; codes from none."""
        workflow = Workflow.from_spec(spec)
        shutil.rmtree(self.ws.table("etl", "vocabulary"), ignore_errors=True)
        # The frame is not looked at: files are.
        split = split_rows(spec, self._spark.createDataFrame([], spec.table.spark_schema + ", " + _META), DS)
        vocabularies = VocabularyTable(self._spark, self.ws.table("etl", "vocabulary"), DS)
        with files_of_day(spec, self.ws, DS, self.table, 0, workflow, split) as files, vocabularies.in_background():
            assert files is not None
            tick = time.perf_counter()
            counts, fitted = fit_files(workflow, files, split, vocabularies, self._spark, "etl")
            done = time.perf_counter()
            with new_directory(out) as folder:
                fitted.save(folder / "workflow")
                plans = plan_files(counts, spec.features.row_group_rows, spec.features.min_row_groups)
                written = write_encoded(fitted, files, plans, folder, folder / "workflow", self._spark)
                vocabularies.wait()
            assert sum(f.rows for f in written.files) == self.rows
            return done - tick, time.perf_counter() - done, fitted

    def forget(self, days: int = DAYS) -> None:
        """Remove what was decoded of the newest days."""
        folder = next(p for p in self.ws.encoded("etl").iterdir() if not p.name.startswith("scratch"))
        if days == DAYS:
            shutil.rmtree(folder)
            return
        from headrace.features.lake_files.encode import LakeFile

        newest = sorted({f.partition["ds"] or "" for f in self.files})[-days:]
        for file in self.files:
            if file.partition["ds"] in newest:
                shutil.rmtree(folder / LakeFile(str(file.path), 0).key)


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    tick = time.perf_counter()
    work()
    return time.perf_counter() - tick


def decode(paths: list[str]) -> None:
    """All of the files by pyarrow, as it reads at its fastest, on all cores."""
    for path in paths:
        pq.read_table(path, read_dictionary=list(CATEGORIES))


def nvtabular(lake: Lake, out: Path, workers: str) -> dict[str, float] | str:
    """Seconds by phase and peak MiB, or why not."""
    if not NVTABULAR.exists():
        return "NVTabular is not installed: make bench-etl-peers"
    script = checkout() / "bench" / "peers" / "etl_nvtabular.py"
    command = [str(NVTABULAR), str(script), str(out), workers, ",".join(lake.paths(False)), ",".join(lake.paths(True))]
    with peak_of_tree() as before:
        time.sleep(0.5)
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, text=True)
        with peak_of_tree(process.pid) as peak:
            code = process.wait()
        stdout.seek(0)
        stderr.seek(0)
        if code:
            return f"NVTabular ended with {code}: {stderr.read().strip().splitlines()[-1:]}"
        found: dict[str, float] = json.loads(stdout.read().strip().splitlines()[-1])
    del before
    return found | {"peak": peak.mib}


def of_size(spark: SparkSession, millions: float, peers: set[str], work: Path) -> list[Figure]:
    """All figures of one size."""
    rows = int(millions * 1e6)
    at = f"{millions:g} M rows"
    folder = work / f"{rows}"
    lake = Lake(spark, folder, write_days(folder / "raw", rows, DAYS), rows)
    shutil.rmtree(folder / "raw")
    everything = lake.paths(False) + lake.paths(True)
    spec = spec_of()

    copies, raws, mine, nexts = [], [], [], []
    for _ in range(REPEATS):
        with peak_of_tree() as copy_peak:
            copies.append(seconds(lambda: spark.read.parquet(*everything).write.parquet(str(folder / "copy"))))
        shutil.rmtree(folder / "copy")
        raws.append(seconds(lambda: decode(everything)))
        with peak_of_tree() as peak:
            mine.append(lake.features(spec, folder / "out"))
        lake.forget(1)
        nexts.append(sum(lake.features(spec, folder / "out")[:2]))
        lake.forget()
    copy, raw, again = min(copies), min(raws), min(nexts)
    fit, write, fitted = min(mine, key=lambda m: m[0] + m[1])
    floor = rows / copy
    total = rows / (fit + write)
    figures = [
        Figure(f"fit, {at}", rows / fit, "rows/s"),
        Figure(f"transform and write, {at}", rows / write, "rows/s"),
        Figure(f"fit, transform and write, {at}", total, "rows/s", floor=floor),
        Figure(f"the same when only one of {DAYS} days is new, {at}", rows / again, "rows/s", floor=floor),
        Figure(f"plain Spark copy, {at}", floor, "rows/s"),
        Figure(f"pyarrow decode alone, {at}", rows / raw, "rows/s", peer=total),
        Figure(f"values in vocabularies, {at}", float(sum(map(len, fitted.vocabularies.values()))), "values"),
        Figure(f"peak memory of all processes, {at}", peak.mib, "MiB", floor=copy_peak.mib),
    ]
    if "textbook" in peers:
        parts = textbook(spark, lake.paths(False), lake.paths(True), folder / "textbook", MIN_COUNT)
        peer = rows / sum(parts)
        figures.append(
            Figure(f"against the textbook way (a broadcast join a column), {at}", total, "rows/s", peer=peer)
        )
    if "nvtabular" in peers:
        tries = {w: nvtabular(lake, folder / f"nvtabular-{w}", w) for w in ("synchronous", "2")}
        ran = {w: t for w, t in tries.items() if not isinstance(t, str)}
        for reason in {t for t in tries.values() if isinstance(t, str)}:
            print(f"left out: {reason}")
        if ran:
            best = min(ran.values(), key=lambda t: t["fit"] + t["write"])
            peer = rows / (best["fit"] + best["write"])
            figures += [
                Figure(f"against NVTabular 23.8, {at}", total, "rows/s", peer=peer),
                Figure(f"fit against NVTabular 23.8, {at}", rows / fit, "rows/s", peer=rows / best["fit"]),
                Figure(f"write against NVTabular 23.8, {at}", rows / write, "rows/s", peer=rows / best["write"]),
                Figure(f"peak memory against NVTabular 23.8, {at}", peak.mib, "MiB", peer=best["peak"]),
            ]
    shutil.rmtree(folder)
    return figures


def of_vocabulary(spark: SparkSession, work: Path, rows: int = 2_000_000) -> list[Figure]:
    """One category of 10 thousand, 100 thousand and 1 million values, each of which gets a code."""
    figures = []
    first = None
    for values in (10_000, 100_000, 1_000_000):
        folder = work / f"values-{values}"
        (folder / "raw").mkdir(parents=True)
        rng = np.random.default_rng(values)
        raw = []
        for day in range(DAYS):
            n = rows // DAYS
            keys = rng.integers(0, values, n).astype(np.uint32) * np.uint32(2_654_435_761)  # odd: no two become one
            start = np.datetime64(f"2026-01-{day + 1:02d}", "us")
            table = {
                "label": pa.array(rng.integers(0, 2, n).astype(np.int32)), "C1": hexadecimal(keys),
                "ts": pa.array(start + np.zeros(n, "timedelta64[us]")).cast(pa.timestamp("us", tz="UTC")),
                "_source_file": pa.array([f"day-{day}"] * n), "_source_line": pa.array(np.arange(n)),
                "ds": pa.array([f"2026-01-{day + 1:02d}"] * n),
            }  # fmt: skip
            raw.append(folder / "raw" / f"{day}.parquet")
            pq.write_table(pa.table(table), raw[-1])
        lake = Lake(spark, folder, raw, n * DAYS)
        with peak_of_tree() as peak:
            fit, write, fitted = lake.features(spec_of(("C1",), (), 1), folder / "out")
        rate = n * DAYS / (fit + write)
        first = first or rate
        name = f"one category of {len(fitted.vocabularies['C1']):,} values, {n * DAYS / 1e6:g} M rows"
        figures.append(Figure(name, rate, "rows/s", peer=first))
        figures.append(Figure(f"{name}, peak memory", peak.mib, "MiB"))
        shutil.rmtree(folder)
    return figures


def of_real_lines(work: Path) -> list[Figure]:
    """The stage `features` of the shipped pipeline on the real lines."""
    data = checkout().parent / "shared" / "data" / "criteo" / "kaggle-first-10k.txt"
    if not data.is_file():
        print(f"left out: the real lines are not here ({data})")
        return []
    ws, spec = Workspace(work / "real"), load_spec("criteo", [f"source.path={data}"])
    assert spec.ds is not None
    run_stage(Ingest(), spec, ws, spec.ds)
    first = run_stage(BuildFeatures(), spec, ws, spec.ds).manifest
    rows = sum(first.rows.values())
    return [Figure(f"the whole stage on {rows:,} real lines", rows / first.seconds, "rows/s")]


def main(sizes: list[float], peers: set[str]) -> None:
    """Measure all sizes in one session, warmed by a small day."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        work = Path(name)
        with session(load_spec("criteo").spark, Workspace(work), "bench-etl") as spark:
            warm = Lake(spark, work / "warm", write_days(work / "warm" / "raw", 40_000, DAYS), 40_000)
            for _ in range(2):
                warm.features(spec_of(), work / "warm" / "out")
                warm.forget()
            spark.read.parquet(*warm.paths(False)).write.parquet(str(work / "warm" / "copy"))
            if "textbook" in peers:
                textbook(spark, warm.paths(False), warm.paths(True), work / "warm" / "textbook", MIN_COUNT)
            figures = [f for size in sizes for f in of_size(spark, size, peers, work)]
            figures += of_vocabulary(spark, work)
            figures += of_real_lines(work)
        publish("etl", figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("millions", nargs="*", type=float, default=[1.0, 2.0])
    parser.add_argument("--peers", default=",".join(PEERS))
    given = parser.parse_args()
    main(given.millions, set(given.peers.split(",")) & set(PEERS))
