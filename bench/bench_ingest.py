"""Landing files of text to the lake, beside what only reads and writes them.

make bench-ingest: JSON lines, CSV and Criteo's lines, 1, 4 and 16 M rows: the stage `ingest` without the start of its
session, checksums, checks and commit included, a key compared with all others in the first two; plain Spark from the
same files to a Delta table; the floor, pyarrow's readers and a Parquet file, on all cores; DuckDB and Polars, each in
an environment of its own (make bench-etl-peers). Rows a second, and memory at its peak.

    python -m bench.bench_ingest [MILLIONS ...]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.json as pjson
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from bench.memory import peak_of_tree
from bench.report import Figure, publish
from headrace.config import Spark, Spec, build_spec
from headrace.lake.ingest.stage import Ingest
from headrace.lake.session import session
from headrace.lake.sources.criteo import CRITEO
from headrace.stage import run_stage
from headrace.workspace import Workspace, checkout

DAY = "2026-03-01"
FORMS = ("jsonl", "csv", "criteo")
CLICKS = {
    "id": "string",
    "ts": "timestamp",
    "user": "bigint",
    "item": "bigint",
    "clicked": "int",
    "price": "double",
    "country": "string",
    "device": "string",
}
COLUMNS: Mapping[str, Mapping[str, str]] = {
    "jsonl": CLICKS,
    "csv": CLICKS,
    "criteo": {c: "string" if c.startswith("C") else "int" for c in CRITEO},
}
PEERS = ("duckdb", "polars")
_PYTHON = checkout() / "build" / "peers" / "duckdb-polars" / "bin" / "python"
_FILES = 4
_AT_ONCE = 250_000


def write_text(form: str, folder: Path, rows: int) -> list[Path]:
    """The landing files: `_FILES` of about as many rows."""
    folder.mkdir(parents=True)
    paths = []
    for k in range(_FILES):
        path = folder / f"part-{k}.{'jsonl' if form == 'jsonl' else 'csv' if form == 'csv' else 'txt'}"
        paths.append(path)
        with path.open("w") as out:
            if form == "csv":
                out.write(",".join(CLICKS) + "\n")
            for start in range(rows * k // _FILES, rows * (k + 1) // _FILES, _AT_ONCE):
                end = min(start + _AT_ONCE, rows * (k + 1) // _FILES)
                out.writelines(_lines(form, start, end))
    return paths


def _lines(form: str, start: int, end: int) -> list[str]:
    rng, n = np.random.default_rng([17, start]), end - start
    if form == "criteo":
        label, names = rng.integers(0, 2, n).tolist(), rng.zipf(1.2, (n, 26)) % 10_000_000
        counts = rng.integers(-1, 500, (n, 13)).tolist()
        missing = (rng.random((n, 13)) < 0.2).tolist()
        return [
            "\t".join([str(y), *("" if m else str(c) for c, m in zip(cs, ms, strict=True)), *map("%08x".__mod__, xs)])
            + "\n"
            for y, cs, ms, xs in zip(label, counts, missing, names.tolist(), strict=True)
        ]
    users, items = rng.zipf(1.3, n).tolist(), rng.zipf(1.2, n).tolist()
    prices, seconds = rng.integers(100, 100_000, n).tolist(), rng.integers(0, 86_400, n).tolist()
    made = []
    for k in range(n):
        s, clicked, price = seconds[k], k % 7 == 0, prices[k] / 100
        ts = f"{DAY}T{s // 3600:02d}:{s // 60 % 60:02d}:{s % 60:02d}.{k % 1000:03d}Z"
        row = (f"e{start + k:012d}", ts, users[k], items[k], int(clicked), price, f"c{users[k] % 200}", "phone")
        if form == "csv":
            made.append(",".join(map(str, row)) + "\n")
        else:
            made.append(json.dumps(dict(zip(CLICKS, row, strict=True))) + "\n")
    return made


def spec_of(form: str) -> Spec:
    """A pipeline that ingests them."""
    clicks = form != "criteo"
    return build_spec(
        {
            "pipeline": form,
            "source": {"format": form, "path": f"in/{form}/{{ds}}/*"},
            "table": {
                "columns": [{"name": n, "type": t} for n, t in COLUMNS[form].items()],
                **({"keys": ["id"], "event_time": "ts"} if clicks else {}),
            },
            "features": {"label": "clicked" if clicks else "label", "workflow": [], "split": {"by": "position"}},
        }
    )


def ours(form: str, ws: Workspace) -> int:
    """The stage."""
    return int(run_stage(Ingest(), spec_of(form), ws, DAY).manifest.rows["kept"])


def plain_spark(spark: SparkSession, form: str, paths: list[Path], out: Path) -> int:
    """What one writes without thinking: a declared schema, and a write."""
    schema = ", ".join(f"`{n}` {t}" for n, t in COLUMNS[form].items())
    reader, names = spark.read.schema(schema), [str(p) for p in paths]
    if form == "jsonl":
        frame = reader.json(names)
    else:
        options = {"sep": "\t", "quote": ""} if form == "criteo" else {"header": "true"}
        frame = reader.options(**options).csv(names)
    frame.write.format("delta").save(str(out))
    return frame.sparkSession.read.format("delta").load(str(out)).count()


def floor(form: str, paths: list[Path], out: Path) -> tuple[float, int]:
    """(seconds, rows) of pyarrow's own readers and a Parquet file."""
    types = {"int": pa.int32(), "bigint": pa.int64(), "double": pa.float64(), "string": pa.string()}
    types["timestamp"] = pa.timestamp("us", tz="UTC")
    columns = {n: types[t] for n, t in COLUMNS[form].items()}
    tick, rows = time.perf_counter(), 0
    writer: Any = None
    for path in paths:
        if form == "jsonl":
            chosen = pjson.ParseOptions(explicit_schema=pa.schema(list(columns.items())))
            batches = [pjson.read_json(path, pjson.ReadOptions(block_size=4 << 20), chosen)]
        else:
            names = None if form == "csv" else list(columns)
            batches = pcsv.open_csv(
                path,
                pcsv.ReadOptions(block_size=4 << 20, column_names=names),
                pcsv.ParseOptions(delimiter="," if form == "csv" else "\t", quote_char='"' if form == "csv" else False),
                pcsv.ConvertOptions(column_types=columns, null_values=[""], strings_can_be_null=True),
            )
        for batch in batches:
            writer = writer or pq.ParquetWriter(out, batch.schema, compression="snappy")
            writer.write(batch)
            rows += batch.num_rows
    writer.close()
    return time.perf_counter() - tick, rows


def peer(name: str, form: str, paths: list[Path], out: Path) -> tuple[float, float] | None:
    """(seconds, peak MiB) of a program in its own environment; None where it is not there or failed."""
    if not _PYTHON.exists():
        print(f"left out: {name} is not installed: make bench-etl-peers")
        return None
    script = checkout() / "bench" / "peers" / "ingest_text.py"
    files = ",".join(str(p) for p in paths)
    command = [str(_PYTHON), str(script), name, form, str(out), files, json.dumps(COLUMNS[form])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with peak_of_tree(process.pid) as peak:
        said, complaint = process.communicate()
    if process.returncode:
        print(f"left out: {name} ended with {process.returncode}: {complaint.strip().splitlines()[-1:]}")
        return None
    return float(json.loads(said.strip().splitlines()[-1])["seconds"]), peak.mib


def measure(millions: float, form: str, work: Path) -> list[Figure]:
    """The figures of one format at one size."""
    rows = round(millions * 1_000_000)
    ws = Workspace(work / "home")
    paths = write_text(form, Path(ws.home) / "in" / form / DAY, rows)
    title = f"{form}, {millions:g} M rows"
    with ProcessPoolExecutor(1, get_context("spawn")) as alone:
        floor_s, read = alone.submit(floor, form, paths, work / "floor.parquet").result()
    assert read == rows, (read, rows)
    with session(Spark(), ws, "bench ingest") as spark:
        spark.range(1000).count()
        spark_s = _seconds(lambda: plain_spark(spark, form, paths, work / "plain"), rows)
        with peak_of_tree() as peak:
            ours_s = _seconds(lambda: ours(form, ws), rows)
    figures = [
        Figure(f"{title}: headrace", rows / ours_s, "rows/s", floor=rows / floor_s, peer=rows / spark_s),
        Figure(f"{title}: memory beyond the JVM", peak.python_mib, "MiB"),
        Figure(f"{title}: memory in all", peak.mib, "MiB"),
    ]
    for name in PEERS:
        found = peer(name, form, paths, work / f"{name}.parquet")
        if found is not None:
            figures.append(Figure(f"{title}: beside {name}", rows / ours_s, "rows/s", peer=rows / found[0]))
            figures.append(Figure(f"{title}: memory of {name}", found[1], "MiB"))
    return figures


def _seconds(work: Callable[[], int], rows: int) -> float:
    tick = time.perf_counter()
    found = work()
    took = time.perf_counter() - tick
    assert found == rows, (found, rows)
    return took


def main(sizes: list[float], forms: list[str]) -> None:
    """Measure and publish."""
    figures = []
    for millions in sizes:
        for form in forms:
            work = Path(tempfile.mkdtemp(prefix="bench-ingest-"))
            try:
                figures += measure(millions, form, work)
            finally:
                shutil.rmtree(work)
    publish("ingest", figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("millions", nargs="*", type=float, default=[1.0, 4.0, 16.0])
    parser.add_argument("--forms", default=",".join(FORMS), help="some of " + ",".join(FORMS))
    given = parser.parse_args()
    if unknown := set(given.forms.split(",")) - set(FORMS):
        parser.error(f"--forms: there is no {', '.join(sorted(unknown))}; write {', '.join(FORMS)}")
    sys.exit(main(given.millions, given.forms.split(",")))
