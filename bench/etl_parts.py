"""The parts of the bench of features: one size of generated rows, growing vocabularies, the real lines."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from bench.cpu import cpu_of_tree
from bench.criteo_data import CATEGORIES, COUNTS, hexadecimal, write_days
from bench.etl_check import differences
from bench.etl_floors import decode, decode_and_write, seconds, seconds_apart
from bench.etl_lake import DAYS, MIN_COUNT, Lake, spec_of
from bench.etl_peers import APART, run_apart
from bench.memory import peak_of_tree
from bench.peers.etl_textbook import textbook
from bench.report import Figure
from headrace.config import load_spec
from headrace.features.build.stage import BuildFeatures
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.lake.landing.stage import Ingest
from headrace.quality.drift.count_day import count_day
from headrace.stage import run_stage
from headrace.workspace import Workspace, checkout

#: Of the copies and of ours each; the best counts, as of NVTabular's two schedulers.
REPEATS = 3
#: Above so many rows one of each is enough.
REPEATED_ROWS = 8_000_000
#: Rows of the growth with vocabularies, the columns, and the values that each column's rows are drawn from.
VOCABULARY_ROWS = 4_000_000
VOCABULARY_COLUMNS = ("C1", "C2", "C3")
VOCABULARY_VALUES = (10_000, 100_000, 1_000_000, 2_500_000)
REAL_LINES = checkout().parent / "shared" / "data" / "criteo" / "kaggle-first-10k.txt"


def of_size(spark: SparkSession, millions: float, peers: set[str], work: Path) -> list[Figure]:
    """Measure all figures of one size."""
    rows = int(millions * 1e6)
    lake = Lake(spark, work, write_days(work / "raw", rows, DAYS), rows)
    shutil.rmtree(work / "raw")
    return of_lake(spark, lake, f"{millions:g} M rows", peers, work)


def of_real_lines(spark: SparkSession, peers: set[str], work: Path) -> list[Figure]:
    """Measure the same workflow on the real lines, in their order as eight days; the whole stage of the shipped
    pipeline.
    """
    if not REAL_LINES.is_file():
        print(f"left out: the real lines are not here ({REAL_LINES})")
        return []
    raw = real_days(work / "raw")
    rows = sum(pq.read_metadata(p).num_rows for p in raw)
    figures = of_lake(spark, Lake(spark, work, raw, rows), f"{rows:,} real lines", peers, work)
    ws, spec = Workspace(work / "shipped"), load_spec("criteo", [f"source.path={REAL_LINES}"])
    assert spec.ds is not None
    run_stage(Ingest(), spec, ws, spec.ds)
    manifest = run_stage(BuildFeatures(count_day), spec, ws, spec.ds).manifest
    return [
        *figures,
        Figure(
            f"the stage `features` of the shipped pipeline, {rows:,} real lines",
            sum(manifest.rows.values()) / manifest.seconds,
            "rows/s",
        ),
    ]


def real_days(folder: Path) -> list[Path]:
    """Write the real lines in eight files of equal size with the columns of `bench.criteo_data.table_of_day`."""
    folder.mkdir(parents=True)
    types = {"label": pa.int32()} | dict.fromkeys(COUNTS, pa.int32()) | dict.fromkeys(CATEGORIES, pa.string())
    lines = pacsv.read_csv(
        REAL_LINES,
        read_options=pacsv.ReadOptions(column_names=list(types)),
        parse_options=pacsv.ParseOptions(delimiter="\t"),
        convert_options=pacsv.ConvertOptions(column_types=types, strings_can_be_null=True),
    )
    paths = []
    for day in range(DAYS):
        start, end = (lines.num_rows * (day + k) // DAYS for k in (0, 1))
        meta = _meta_columns(day, end - start)
        table = lines.slice(start, end - start)
        for name, column in meta.items():
            table = table.append_column(name, column)
        paths.append(folder / f"day-{day}.parquet")
        pq.write_table(table, paths[-1])
    return paths


def of_lake(spark: SparkSession, lake: Lake, size: str, peers: set[str], work: Path) -> list[Figure]:
    """Measure floors, our stage and peers over the same files of Criteo's columns."""
    rows, spec = lake.rows, spec_of()
    everything = lake.paths(False) + lake.paths(True)
    copies, bare, decoded, runs, nexts, cpus = [], [], [], [], [], []
    for _ in range(REPEATS if rows <= REPEATED_ROWS else 1):
        with peak_of_tree() as copy_peak:
            copies.append(seconds(lambda: spark.read.parquet(*everything).write.parquet(str(work / "copy"))))
        shutil.rmtree(work / "copy")
        decoded.append(seconds_apart(decode, everything, CATEGORIES))
        bare.append(seconds_apart(decode_and_write, everything, CATEGORIES, COUNTS, work / "bare"))
        shutil.rmtree(work / "bare")
        with peak_of_tree() as peak, cpu_of_tree() as cpu:
            runs.append(lake.features(spec, work / "out"))
        cpus.append(cpu.seconds)
        lake.forget(1)
        nexts.append(sum(lake.features(spec, work / "out")[:2]))
        lake.forget()
    fit, write, fitted = min(runs, key=lambda m: m[0] + m[1])
    copy, total = rows / min(copies), rows / (fit + write)
    figures = [
        Figure(f"fit, {size}", rows / fit, "rows/s"),
        Figure(f"transform and write, {size}", rows / write, "rows/s"),
        Figure(f"fit, transform and write, {size}", total, "rows/s", floor=copy),
        Figure(f"the same when only one of {DAYS} days is new, {size}", rows / min(nexts), "rows/s", floor=copy),
        Figure(f"plain Spark copy, {size}", copy, "rows/s"),
        Figure(f"against pyarrow's decode and write of as many bytes, {size}", total, "rows/s", floor=rows / min(bare)),
        Figure(f"against pyarrow's decode alone, {size}", total, "rows/s", floor=rows / min(decoded)),
        Figure(f"values in vocabularies, {size}", float(sum(map(len, fitted.vocabularies.values()))), "values"),
        Figure(f"processor time, {size}", min(cpus), "s"),
        Figure(f"peak memory of all processes, {size}", peak.mib, "MiB", floor=copy_peak.mib),
        Figure(f"peak memory beyond the JVM's heap, {size}", peak.python_mib + beyond_heap_mib(spark), "MiB"),
    ]
    if "textbook" in peers:
        parts = textbook(spark, lake.paths(False), lake.paths(True), work / "textbook", MIN_COUNT)
        name = f"against the textbook way (a broadcast join a column), {size}"
        figures.append(Figure(name, total, "rows/s", peer=rows / sum(parts)))
        shutil.rmtree(work / "textbook")
    for name in (p for p in APART if p in peers):
        measured = (fit, write, peak.mib, min(cpus))
        figures += against(name, lake, size, measured, work, CATEGORIES, COUNTS, MIN_COUNT, fitted)
    return figures


def of_vocabulary(spark: SparkSession, peers: set[str], work: Path) -> list[Figure]:
    """Measure three categories of more and more values, each of which gets a code.

    The peer of a total is the smallest's.
    """
    figures: list[Figure] = []
    first = None
    for values in VOCABULARY_VALUES:
        folder = work / f"values-{values}"
        lake = Lake(spark, folder, drawn_days(folder / "raw", values), VOCABULARY_ROWS)
        with peak_of_tree() as peak, cpu_of_tree() as cpu:
            fit, write, fitted = lake.features(spec_of(VOCABULARY_COLUMNS, (), 1), folder / "out")
        value_count = min(map(len, fitted.vocabularies.values()))
        columns, rows = len(VOCABULARY_COLUMNS), VOCABULARY_ROWS
        size = f"{columns} columns of {value_count:,} values each, {rows / 1e6:g} M rows"
        total = rows / (fit + write)
        first = first or total
        figures += [
            Figure(f"fit, {size}", rows / fit, "rows/s"),
            Figure(f"transform and write, {size}", rows / write, "rows/s"),
            Figure(f"fit, transform and write, {size}; peer: the fewest values", total, "rows/s", peer=first),
            Figure(f"peak memory of all processes, {size}", peak.mib, "MiB"),
        ]
        for name in (p for p in APART if p in peers):
            measured = (fit, write, peak.mib, cpu.seconds)
            figures += against(name, lake, size, measured, folder, VOCABULARY_COLUMNS, (), 1, fitted)
        shutil.rmtree(folder)
    return figures


def drawn_days(folder: Path, values: int) -> list[Path]:
    """Write eight days of `VOCABULARY_COLUMNS` drawn uniformly from `values` texts of eight characters each."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(values)
    rows, paths = VOCABULARY_ROWS // DAYS, []
    for day in range(DAYS):
        table = {"label": pa.array(rng.integers(0, 2, rows).astype(np.int32))}
        for name in VOCABULARY_COLUMNS:
            drawn = rng.integers(0, values, rows).astype(np.uint32)
            table[name] = hexadecimal(drawn * np.uint32(2_654_435_761))  # odd: no two become one
        start = np.datetime64(f"2026-01-{day + 1:02d}", "us")
        table |= _meta_columns(day, rows)
        table["ts"] = pa.array(start + np.zeros(rows, "timedelta64[us]")).cast(pa.timestamp("us", tz="UTC"))
        paths.append(folder / f"{day}.parquet")
        pq.write_table(pa.table(table), paths[-1])
    return paths


def against(
    name: str,
    lake: Lake,
    size: str,
    measured: tuple[float, float, float, float],
    work: Path,
    categories: Sequence[str],
    counts: Sequence[str],
    least: int,
    fitted: FittedWorkflow,
) -> list[Figure]:
    """Measure our stage (seconds of fit, seconds of write, MiB, processor seconds) beside a peer on the same files;
    nothing where it did not run.

    Args:
        work: has our dataset in `out`.

    Raises:
        RuntimeError: the peer's dataset is not the same as ours.
    """
    # As many tries as ours has; NVTabular's are minutes, and its better scheduler counts.
    tries = REPEATS if APART[name].checked and lake.rows <= REPEATED_ROWS else 1
    peer_run = run_apart(name, lake, work / name, categories, counts, least, tries)
    if peer_run is None:
        return []
    title, rows, (fit, write, mib, cpu) = APART[name].title, lake.rows, measured
    if APART[name].checked:
        vocabularies = {n: v.table for n, v in fitted.vocabularies.items()}
        if faults := differences(work / "out", peer_run.folder, vocabularies, categories, counts):
            raise RuntimeError(f"{title} made another dataset than ours: {'; '.join(faults)}")
    shutil.rmtree(work / name)
    return [
        Figure(f"against {title}, {size}", rows / (fit + write), "rows/s", peer=rows / peer_run.seconds),
        Figure(f"fit against {title}, {size}", rows / fit, "rows/s", peer=rows / peer_run.fit_s),
        Figure(f"write against {title}, {size}", rows / write, "rows/s", peer=rows / peer_run.write_s),
        Figure(f"processor time against {title}, {size}", cpu, "s", peer=peer_run.cpu_s),
        Figure(f"peak memory against {title}, {size}", mib, "MiB", peer=peer_run.peak_mib),
    ]


def beyond_heap_mib(spark: SparkSession) -> float:
    """Return MiB that the session's JVM holds beside its heap: classes, compiled code, buffers."""
    assert spark._jvm is not None
    beans = spark._jvm.java.lang.management
    held = beans.ManagementFactory.getMemoryMXBean().getNonHeapMemoryUsage().getCommitted()
    for pool in beans.ManagementFactory.getPlatformMXBeans(
        spark._jvm.java.lang.Class.forName("java.lang.management.BufferPoolMXBean")
    ):
        held += pool.getMemoryUsed() if pool.getName() == "direct" else 0
    return float(held) / 2**20


def _meta_columns(day: int, rows: int) -> dict[str, pa.Array]:
    ds = f"2026-01-{day + 1:02d}"
    noon = np.full(rows, np.datetime64(f"{ds}T12", "us"))
    return {
        "ts": pa.array(noon).cast(pa.timestamp("us", tz="UTC")),
        "_source_file": pa.array([f"day-{day}"] * rows),
        "_source_line": pa.array(np.arange(rows)),
        "ds": pa.array([ds] * rows),
    }
