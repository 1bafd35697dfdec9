"""Landing files of text to the lake, beside what only reads and writes them.

    make bench-ingest                                      # JSON lines, CSV, Criteo lines; 1, 4 and 16 million rows
    python -m bench.bench_ingest csv-4 jsonl-4             # parts: a form, and millions of rows
    python -m bench.bench_ingest renamed-0.06              # lines of which Arrow is unsure, all of them
    python -m bench.bench_ingest --resume                  # only what this checkout has not measured yet
    python -m bench.bench_ingest csv-4 --peers none        # or some of duckdb, polars

Ours is the stage `ingest` without the start of its session: checksums, checks and commit included, and, in JSON lines
and CSV, a key that is compared with all others. Plain Spark goes from the same files to a Delta table. Both are
measured in a session that has done nothing but count, and, up to 4 million rows, once more in the same session. Floor:
pyarrow's readers and a Parquet file, on all cores, in a process of its own. Peers: DuckDB and Polars to a Parquet file,
each in an environment of its own (make bench-etl-peers); one that is not there is left out, with the reason. Figures
are rows a second (the higher the better), or MiB at the peak.

A part runs in a process of its own, and leaves build/bench/ingest/PART.json; ingest.json beside that folder has the
figures of all parts. So a part that is stopped loses only itself.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
import pyarrow.json as pjson
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from bench.report import Figure, FigureParts, publish
from bench.usage import Peak, peak_of_tree
from headrace.config import Spark, Spec, build_spec
from headrace.config.installation import checkout
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.lake.landing.stage import Ingest
from headrace.lake.spark.session import session
from headrace.stage import run_stage
from headrace_datasets.readers import CRITEO

DAY = "2026-03-01"
#: JSON lines whose writer has renamed the key `user` to `visitor`, which becomes a column of the table: Arrow is unsure
#: of each of them.
RENAMED = "renamed"
FORMS = ("jsonl", "csv", "criteo", RENAMED)
#: The forms of `make bench-ingest`.
PLAIN_FORMS = FORMS[:3]
#: By column its Spark type.
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
    RENAMED: CLICKS,
    "criteo": {c: "string" if c.startswith("C") else "int" for c in CRITEO},
}
_ENDINGS = {"csv": "csv", "criteo": "txt"}
_FILES = 4
_AT_ONCE = 250_000


def write_text(form: str, folder: Path, rows: int) -> list[Path]:
    """Write the landing files: `_FILES` of about as many rows."""
    folder.mkdir(parents=True)
    paths = []
    for k in range(_FILES):
        path = folder / f"part-{k}.{_ENDINGS.get(form, 'jsonl')}"
        paths.append(path)
        with path.open("wb") as out:
            if form == "csv":
                out.write((",".join(CLICKS) + "\n").encode())
            for start in range(rows * k // _FILES, rows * (k + 1) // _FILES, _AT_ONCE):
                end = min(start + _AT_ONCE, rows * (k + 1) // _FILES)
                _write_lines(out, _criteo(start, end) if form == "criteo" else _clicks(form, start, end))
    return paths


def _write_lines(out: BinaryIO, lines: pa.StringArray) -> None:
    terminated = pc.binary_join_element_wise(lines, "", "\n")
    out.write(terminated.buffers()[2])


def _clicks(form: str, start: int, end: int) -> pa.StringArray:
    rng, n = np.random.default_rng([17, start]), end - start
    place = np.arange(n)
    users, items = rng.zipf(1.3, n), rng.zipf(1.2, n)
    prices, seconds = rng.integers(100, 100_000, n), rng.integers(0, 86_400, n)
    midnight = np.datetime64(DAY, "ms").astype(np.int64)
    times = pa.array(midnight + seconds * 1000 + place % 1000).cast(pa.timestamp("ms"))
    fields = {
        "id": _joined("e", _padded(start + place, 12)),
        "ts": pc.strftime(times, "%Y-%m-%dT%H:%M:%SZ"),
        "user": _text(users),
        "item": _text(items),
        "clicked": _text((place % 7 == 0).astype(np.int8)),
        "price": _joined(_text(prices // 100), ".", _padded(prices % 100, 2)),
        "country": _joined("c", _text(users % 200)),
        "device": "phone",
    }
    if form == "csv":
        return pc.binary_join_element_wise(*fields.values(), ",")
    pieces: list[Any] = []
    for name, value in fields.items():
        quote = '"' if CLICKS[name] in ("string", "timestamp") else ""
        key = "visitor" if form == RENAMED and name == "user" else name
        pieces += [f'{", " if pieces else "{"}"{key}": {quote}', value, quote]
    return _joined(*pieces, "}")


def _criteo(start: int, end: int) -> pa.StringArray:
    rng, n = np.random.default_rng([17, start]), end - start
    label, names = rng.integers(0, 2, n), rng.zipf(1.2, (26, n)) % 10_000_000
    counts, missing = rng.integers(-1, 500, (13, n)), rng.random((13, n)) < 0.2
    numbers = [pc.if_else(pa.array(m), "", _text(c)) for c, m in zip(counts, missing, strict=True)]
    return pc.binary_join_element_wise(_text(label), *numbers, *map(_hexadecimal, names), "\t")


def _text(values: npt.NDArray[Any]) -> pa.StringArray:
    return pa.array(values).cast(pa.string())


def _padded(values: npt.NDArray[Any], width: int) -> pa.StringArray:
    return pc.utf8_lpad(_text(values), width, "0")


def _joined(*pieces: pa.StringArray | str) -> pa.StringArray:
    return pc.binary_join_element_wise(*pieces, "")


def _hexadecimal(values: npt.NDArray[np.int64]) -> pa.StringArray:
    """Return the values as eight digits each."""
    nibbles = (values[:, None] >> np.arange(28, -1, -4)) & 15
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)[nibbles]
    offsets = np.arange(0, 8 * len(values) + 1, 8, dtype=np.int32)
    return pa.StringArray.from_buffers(len(values), pa.py_buffer(offsets), pa.py_buffer(digits))


PEERS = ("duckdb", "polars")
_PYTHON = checkout() / "build" / "peers" / "duckdb-polars" / "bin" / "python"
#: Up to so many rows both are measured a second time.
TWICE_ROWS = 4_000_000
_PARTS = FigureParts.named("ingest")


def spec_of(form: str) -> Spec:
    """Return a pipeline that ingests landing files of a form."""
    clicks = form != "criteo"
    return build_spec(
        {
            "pipeline": form,
            "source": {"format": "jsonl" if form == RENAMED else form, "path": f"in/{form}/{{ds}}/*"},
            "table": {
                "columns": [{"name": n, "type": t} for n, t in COLUMNS[form].items()],
                **({"keys": ["id"], "event_time": "ts"} if clicks else {}),
                **({"new_columns": "accept"} if form == RENAMED else {}),
            },
            "features": {"label": "clicked" if clicks else "label", "workflow": [], "split": {"by": "position"}},
        }
    )


def ingest_by_stage(form: str, ws: Workspace) -> int:
    """Run the stage; return how many rows it kept."""
    return int(run_stage(Ingest(), spec_of(form), ws, DAY).manifest.rows["kept"])


def plain_spark(spark: SparkSession, form: str, paths: list[Path], out: Path) -> int:
    """Write a table as one does without thinking: a declared schema, and a write. Return its rows."""
    schema = ", ".join(f"`{n}` {t}" for n, t in COLUMNS[form].items())
    reader, names = spark.read.schema(schema), [str(p) for p in paths]
    if form in ("jsonl", RENAMED):
        frame = reader.json(names)
    else:
        options = {"sep": "\t", "quote": ""} if form == "criteo" else {"header": "true"}
        frame = reader.options(**options).csv(names)
    frame.write.format("delta").save(str(out))
    return frame.sparkSession.read.format("delta").load(str(out)).count()


def floor(form: str, paths: list[Path], out: Path) -> tuple[float, int]:
    """Measure (seconds, rows) of pyarrow's own readers and a Parquet file."""
    types = {"int": pa.int32(), "bigint": pa.int64(), "double": pa.float64(), "string": pa.string()}
    types["timestamp"] = pa.timestamp("us", tz="UTC")
    columns = {n: types[t] for n, t in COLUMNS[form].items()}
    tick, rows = time.perf_counter(), 0
    writer: Any = None
    for path in paths:
        if form in ("jsonl", RENAMED):
            schema = pa.schema(list(columns.items()))
            chosen = pjson.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
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
    """Measure (seconds, peak MiB) of a program in its own environment; None where it is not there or failed."""
    if not _PYTHON.exists():
        print(f"left out: {name} is not installed: make bench-etl-peers")
        return None
    script = checkout() / "bench" / "peers" / "ingest_text.py"
    files = ",".join(str(p) for p in paths)
    command = [str(_PYTHON), str(script), name, form, str(out), files, json.dumps(COLUMNS[form])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with peak_of_tree(process.pid) as peak:
        stdout, complaint = process.communicate()
    if process.returncode:
        print(f"left out: {name} ended with {process.returncode}: {complaint.strip().splitlines()[-1:]}")
        return None
    return float(json.loads(stdout.strip().splitlines()[-1])["seconds"]), peak.mib


def in_session(
    reader_name: str, form: str, paths: list[Path], rows: int, work: Path, times: int
) -> tuple[list[float], Peak]:
    """Measure (seconds of each time, memory of the first) of the stage or of `plain_spark`, in a session of its own."""
    seconds, first = [], Peak()
    with session(Spark(), Workspace(work), "bench ingest") as spark:
        spark.range(1000).count()
        for k in range(times):
            ws = Workspace(work / f"home-{k}")
            landing = Path(ws.home) / "in" / form / DAY
            landing.mkdir(parents=True)
            for path in paths:
                (landing / path.name).hardlink_to(path)
            with peak_of_tree() as peak:
                tick = time.perf_counter()
                if reader_name == "headrace":
                    row_count = ingest_by_stage(form, ws)
                else:
                    row_count = plain_spark(spark, form, sorted(landing.iterdir()), work / f"plain-{k}")
                seconds.append(time.perf_counter() - tick)
            first = first if k else peak
            print(f"{reader_name}, {form}: {row_count:,} rows in {seconds[-1]:.1f} s", flush=True)
            assert row_count == rows, row_count
            shutil.rmtree(work / f"home-{k}")
    shutil.rmtree(work)
    return seconds, first


def measure(part: str, peers: Sequence[str], work: Path) -> list[Figure]:
    """Measure the figures of one form at one size."""
    form, millions = part.rsplit("-", 1)
    rows = round(float(millions) * 1_000_000)
    paths = write_text(form, work / "text", rows)
    title, times = f"{form}, {millions} M rows", 2 if rows <= TWICE_ROWS else 1

    def apart(do: Callable[..., Any], *arguments: Any) -> Any:
        with ProcessPoolExecutor(1, get_context("spawn")) as alone:
            return alone.submit(do, *arguments).result()

    floor_s, read = apart(floor, form, paths, work / "floor.parquet")
    assert read == rows, (read, rows)
    spark_s, spark_peak = apart(in_session, "plain Spark", form, paths, rows, work / "spark", times)
    stage_s, peak = apart(in_session, "headrace", form, paths, rows, work / "headrace", times)
    figures = [
        Figure(f"{title}: headrace{name}", rows / own_s, "rows/s", floor=rows / floor_s, peer=rows / plain_s)
        for name, own_s, plain_s in zip(("", ", again"), stage_s, spark_s, strict=False)
    ]
    figures += [
        Figure(f"{title}: memory in all", peak.mib, "MiB", peer=spark_peak.mib),
        Figure(f"{title}: memory beyond the JVM", peak.python_mib, "MiB"),
    ]
    for name in peers:
        measured = peer(name, form, paths, work / f"{name}.parquet")
        if measured is not None:
            figures.append(Figure(f"{title}: beside {name}", rows / min(stage_s), "rows/s", peer=rows / measured[0]))
            figures.append(Figure(f"{title}: memory beside {name}", peak.mib, "MiB", peer=measured[1]))
    return figures


def part_named(text: str) -> str:
    """Return the name of a part: a form and millions of rows, as `csv-4`, `jsonl-0.25`. Raises UserError."""
    form, _, millions = text.partition("-")
    try:
        size = float(millions)
    except ValueError:
        size = 0.0
    if form not in FORMS or not 0.001 <= size <= 1_000:
        raise UserError(f"'{text}' is no part: give a form ({', '.join(FORMS)}) and millions of rows, as csv-4")
    return f"{form}-{size:g}"


def in_order(parts: Sequence[str]) -> list[str]:
    """Return parts ordered by size, then by form."""
    keys = {p: (float(p.rsplit("-", 1)[1]), FORMS.index(p.rsplit("-", 1)[0])) for p in parts}
    return sorted(parts, key=keys.__getitem__)


def main(parts: list[str], peers: list[str], resume: bool) -> int:
    """Measure the parts, each in a process of its own. Returns how many failed."""
    failed = _PARTS.run(parts, ["--peers", ",".join(peers) or "none"], resume)
    publish("ingest", [f for part in in_order(_PARTS.measured()) for f in _PARTS.figures(part)])
    return failed


if __name__ == "__main__":
    # So that sessions end and folders are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[f"{form}-{size}" for size in (1, 4, 16) for form in PLAIN_FORMS])
    parser.add_argument("--peers", default=",".join(PEERS), help="none, or some of " + ",".join(PEERS))
    parser.add_argument("--resume", action="store_true", help="skip parts that this commit has measured")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        parts = [part_named(part) for part in args.parts]
    except UserError as e:
        parser.error(str(e))
    named = [p for p in args.peers.split(",") if p != "none"]
    if unknown := set(named) - set(PEERS):
        parser.error(f"--peers: there is no {', '.join(sorted(unknown))}; write {', '.join(PEERS)}")
    if not args.in_process:
        sys.exit(1 if main(parts, named, args.resume) else 0)
    for part in parts:
        with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
            _PARTS.save(part, measure(part, named, Path(folder)))
