"""Features of Criteo-shaped rows: the Arrow engine's fit, transform and write beside its floors and its peers.

    make bench-etl                               # 1 and 2 million rows, vocabularies, real lines; all peers
    python -m bench.bench_etl 1 4 8              # millions of rows, each a part of its own
    python -m bench.bench_etl 4 16 --peers duckdb,polars
    python -m bench.bench_etl 8 --peers none     # or some of nvtabular, duckdb, polars, textbook
    python -m bench.bench_etl pairs-4 pairs-16   # ours and DuckDB in turns, five times each
    python -m bench.bench_etl vocabulary real    # the other parts
    python -m bench.bench_etl 1 2 4 8 --resume   # only what this checkout has not measured yet

Workflow: 26 categories by categorify (min_count 15), 13 counts by fill_missing, clip, log, normalize; eight days in a
Delta table, the last validates. Figures are rows a second over all rows (the higher the better) unless they say MiB,
values or s, which is processor time; of the best of three tries, as are DuckDB's and Polars's (one above 8 million
rows; of NVTabular, of its two schedulers). Floors: a plain Spark copy of the same files in the same session, and
pyarrow's bare decode and write of as many bytes. Peers: as named, on the same files. One that is not there is left out,
with the reason. What DuckDB and Polars wrote is compared with ours, row by row; where it differs, the part fails.

A part runs in a process of its own, with a warmed session, and leaves build/bench/etl/PART.json; etl.json beside that
folder has the figures of all parts. So a part that is stopped loses only itself.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from bench.criteo_data import CATEGORIES, COUNTS, DAYS, MIN_COUNT, Lake, hexadecimal, spec_of, write_days
from bench.etl_peers import APART, decode, decode_and_write, differences, run_apart, seconds, seconds_apart, textbook
from bench.report import Figure, FigureParts, publish
from bench.usage import cpu_of_tree, peak_of_tree
from headrace.config import load_spec
from headrace.config.installation import checkout
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.features.build.stage import BuildFeatures
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.lake.landing.stage import Ingest
from headrace.lake.spark.session import session
from headrace.quality.drift.count_day import count_day
from headrace.stage import run_stage

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


#: Of ours and of DuckDB's each.
PAIRS = 5
_PAIRED_PEER = "duckdb"


def of_pairs(spark: SparkSession, millions: float, work: Path) -> list[Figure]:
    """Measure rates and processor time of five tries each, by turns: medians, and every pair as it was."""
    rows, title = int(millions * 1e6), APART[_PAIRED_PEER].title
    lake = Lake(spark, work, write_days(work / "raw", rows, DAYS), rows)
    shutil.rmtree(work / "raw")
    size, figures, rates, peer_rates, cpus, peer_cpus = f"{millions:g} M rows", [], [], [], [], []
    for pair in range(1, PAIRS + 1):
        with cpu_of_tree() as cpu:
            fit, write, _ = lake.features(spec_of(), work / "out")
        lake.forget()
        shutil.rmtree(work / "out")
        ran = run_apart(_PAIRED_PEER, lake, work / _PAIRED_PEER, CATEGORIES, COUNTS, MIN_COUNT)
        if ran is None:
            return []
        shutil.rmtree(work / _PAIRED_PEER)
        rates.append(rows / (fit + write))
        peer_rates.append(rows / ran.seconds)
        cpus.append(cpu.seconds)
        peer_cpus.append(ran.cpu_s)
        print(f"pair {pair}: {rates[-1]:,.0f} and {peer_rates[-1]:,.0f} rows/s", flush=True)
        figures.append(Figure(f"pair {pair} with {title}, {size}", rates[-1], "rows/s", peer=peer_rates[-1]))
    ratio = median(a / b for a, b in zip(rates, peer_rates, strict=True))
    return [
        *figures,
        Figure(f"median of {PAIRS} pairs with {title}, {size}", ratio, "times as fast"),
        Figure(f"processor time, median of {PAIRS} tries, {size}", median(cpus), "s", peer=median(peer_cpus)),
    ]


_TOTAL_NAME, _COPY_NAME = "fit, transform and write, ", "plain Spark copy, "
#: Heading -> the figure's name without its part, and which of its numbers.
_TABLE_COLUMNS: Mapping[str, tuple[str, str]] = {
    "fit": ("fit, ", "value"),
    "transform and write": ("transform and write, ", "value"),
    "all": (_TOTAL_NAME, "value"),
    "next day": ("the same when only one of 8 days is new, ", "value"),
    "Spark copy": (_TOTAL_NAME, "floor"),
    "ours / copy": (_TOTAL_NAME, "ratio floor"),
    "NVTabular": ("against NVTabular 23.8, ", "peer"),
    "ours / NVTabular": ("against NVTabular 23.8, ", "ratio peer"),
    "DuckDB": ("against DuckDB 2.0, ", "peer"),
    "ours / DuckDB": ("against DuckDB 2.0, ", "ratio peer"),
    "Polars": ("against Polars 2.1, ", "peer"),
    "ours / Polars": ("against Polars 2.1, ", "ratio peer"),
    "ours / join a column": ("against the textbook way (a broadcast join a column), ", "ratio peer"),
    "ours / bare decode and write": ("against pyarrow's decode and write of as many bytes, ", "ratio floor"),
    "CPU s": ("processor time, ", "value"),
    "DuckDB's CPU s": ("processor time against DuckDB 2.0, ", "peer"),
    "Polars's CPU s": ("processor time against Polars 2.1, ", "peer"),
    "peak MiB": ("peak memory of all processes, ", "value"),
    "beyond the JVM's heap": ("peak memory beyond the JVM's heap, ", "value"),
    "NVTabular's": ("peak memory against NVTabular 23.8, ", "peer"),
    "DuckDB's": ("peak memory against DuckDB 2.0, ", "peer"),
    "Polars's": ("peak memory against Polars 2.1, ", "peer"),
}


def markdown(figures: Sequence[Figure]) -> str:
    """Return a table of rows/s, ratios and MiB by part; a dash where something was left out."""
    by_name = {f.name.split("; peer: ")[0]: f for f in figures}
    parts = [name.removeprefix(_TOTAL_NAME) for name in by_name if name.startswith(_TOTAL_NAME)]
    lines = ["| | " + " | ".join(_TABLE_COLUMNS) + " |", "| --- |" + " ---: |" * len(_TABLE_COLUMNS)]
    for part in parts:
        cells = [_cell(by_name.get(prefix + part), kind) for prefix, kind in _TABLE_COLUMNS.values()]
        lines.append(f"| {part} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(figure: Figure | None, kind: str) -> str:
    if figure is None:
        return "–"
    reference = figure.floor if kind.endswith("floor") else figure.peer if kind.endswith("peer") else figure.value
    if reference is None:
        return "–"
    if not kind.startswith("ratio"):
        return f"{reference:,.0f}"
    ratio = figure.value / reference
    return f"{ratio:.2f}" if ratio < 1 else f"{ratio:.1f}"


OTHER_PARTS = ("vocabulary", "real")
PEERS = (*APART, "textbook")
_WARM_ROWS = 40_000
_PARTS = FigureParts.named("etl")
#: Before the millions of rows of a part of pairs.
_PAIRS_PREFIX = "pairs-"
_TOTAL = re.compile(r"^fit, transform and write, ([0-9.]+) M rows$")


def measure(part: str, peers: set[str]) -> list[Figure]:
    """Measure one part in a session that a small day has warmed."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        work = Path(name)
        with session(load_spec("criteo").spark, Workspace(work), "bench-etl") as spark:
            warm = Lake(spark, work / "warm", write_days(work / "warm" / "raw", _WARM_ROWS, DAYS), _WARM_ROWS)
            for _ in range(2):
                warm.features(spec_of(), work / "warm" / "out")
                warm.forget()
            spark.read.parquet(*warm.paths(False)).write.parquet(str(work / "warm" / "copy"))
            if "textbook" in peers and part != "vocabulary":
                textbook(spark, warm.paths(False), warm.paths(True), work / "warm" / "textbook", MIN_COUNT)
            if part == "vocabulary":
                return of_vocabulary(spark, peers, work / part)
            if part == "real":
                return of_real_lines(spark, peers, work / part)
            if part.startswith(_PAIRS_PREFIX):
                return of_pairs(spark, float(part.removeprefix(_PAIRS_PREFIX)), work / part)
            return of_size(spark, float(part), peers, work / part)


def combined(parts: FigureParts = _PARTS) -> list[Figure]:
    """Return the figures of all parts that were measured, by size, then the others; and how the rate grows with the
    rows.
    """
    measured = parts.measured()
    pairs = sorted(p for p in measured if p.startswith(_PAIRS_PREFIX))
    sizes = sorted(set(measured) - {*OTHER_PARTS, *pairs}, key=float)
    figures = [f for part in [*sizes, *(p for p in OTHER_PARTS if p in measured), *pairs] for f in parts.figures(part)]
    totals = {match[1]: f.value for f in figures if (match := _TOTAL.match(f.name))}
    smallest = next(iter(totals), "")
    grown = [
        Figure(f"growth with rows: {size} M against {smallest} M", rate, "rows/s", peer=totals[smallest])
        for size, rate in totals.items()
        if size != smallest
    ]
    return figures + grown


def main(parts: list[str], peers: list[str], resume: bool) -> int:
    """Measure the parts, each in a process of its own. Returns how many failed."""
    failed = _PARTS.run(parts, ["--peers", ",".join(peers) or "none"], resume)
    figures = combined()
    publish("etl", figures)
    print(markdown(figures))
    return failed


def part_named(text: str) -> str:
    """Return the name of a part: `vocabulary`, `real`, or millions of rows as `2`, `0.25`, `pairs-16`."""
    if text in OTHER_PARTS:
        return text
    pairs = _PAIRS_PREFIX if text.startswith(_PAIRS_PREFIX) else ""
    try:
        millions = float(text.removeprefix(pairs))
    except ValueError:
        raise UserError(
            f"'{text}' is no part: give millions of rows, {_PAIRS_PREFIX}16, {' or '.join(OTHER_PARTS)}"
        ) from None
    if not 0.001 <= millions <= 1_000:
        raise UserError(f"{text} million rows: give 0.001 to 1000")
    return f"{pairs}{millions:g}"


if __name__ == "__main__":
    # So that sessions end and folders are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["1", "2", *OTHER_PARTS])
    parser.add_argument("--peers", default=",".join(PEERS), help="none, or some of " + ",".join(PEERS))
    parser.add_argument("--resume", action="store_true", help="skip parts that this commit has measured")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        parts = [part_named(part) for part in args.parts]
        named = [p for p in args.peers.split(",") if p != "none"]
        if unknown := set(named) - set(PEERS):
            raise UserError(f"--peers {args.peers}: there is no {', '.join(sorted(unknown))}; write {', '.join(PEERS)}")
    except UserError as e:
        parser.error(str(e))
    if not args.in_process:
        sys.exit(1 if main(parts, named, args.resume) else 0)
    for part in parts:
        _PARTS.save(part, measure(part, set(named)))
