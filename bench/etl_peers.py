"""Floors and peers of the bench of features, over the same files.

- Floors are copies that understand nothing: a decode, and a decode and a write.
- The textbook Spark way: a count a column, then one broadcast join a column and expressions for the rest.
- Peers in an environment of their own (bench/peers) run the same workflow: time and peak memory.

What a peer wrote is compared with our dataset: the same values of numbers, the same values kept by categories. The
order of rows and the numbers of codes are each engine's own. So rows are compared as a bag, one by one: a peer's codes
are translated to ours by the vocabularies that it left, and the sums of a hash of each row's codes must agree, which no
order of the rows changes. Numbers are compared column by column, in their order: the engines' logarithms differ in
their last bits.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from bench.criteo_data import CATEGORIES, COUNTS, Lake
from bench.usage import cpu_of_children, peak_of_tree
from headrace.config.installation import checkout
from headrace.config.schema import FIRST_CODE
from headrace.udfs.arrow import xxhash64_integers


def seconds(work: Callable[[], object]) -> float:
    """Measure the seconds that a call takes."""
    tick = time.perf_counter()
    work()
    return time.perf_counter() - tick


def seconds_apart(work: Callable[..., object], *arguments: object) -> float:
    """Measure the seconds that a call takes in a process of its own, whose memory goes with it: Arrow keeps what was
    freed.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_seconds_of, work, arguments).result()


def _seconds_of(work: Callable[..., object], arguments: tuple[object, ...]) -> float:
    return seconds(lambda: work(*arguments))


def decode(paths: Sequence[str], texts: Sequence[str]) -> None:
    """Decode all of the files by pyarrow as it reads at its fastest, on all cores."""
    for path in paths:
        pq.read_table(path, read_dictionary=list(texts))


def decode_and_write(paths: Sequence[str], texts: Sequence[str], numbers: Sequence[str], out: Path) -> None:
    """Decode each file by pyarrow and write as many bytes as the dataset has, on all cores: nothing is looked up, no
    row is moved.

    A text becomes its number in the row group's own dictionary, a number a float32; Parquet pages as the dataset's,
    neither compressed nor dictionaries.
    """
    out.mkdir(parents=True)

    def write_one(pair: tuple[int, str]) -> None:
        number, path = pair
        file = pq.ParquetFile(path, memory_map=True, read_dictionary=list(texts))
        target = out / f"{number}.parquet"
        writer = None
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=[*numbers, *texts], use_threads=False)
            columns: list[pa.Array] = []
            for name in numbers:
                columns.append(pc.fill_null(table.column(name), 0).cast(pa.float32(), safe=False))
            for name in texts:
                chunks = table.column(name).unify_dictionaries().chunks
                columns.append(pa.chunked_array([pc.fill_null(c.indices, 0) for c in chunks]))
            part_table = pa.table(columns, names=[*numbers, *texts])
            writer = writer or pq.ParquetWriter(target, part_table.schema, compression="none", use_dictionary=False)
            writer.write_table(part_table)
        if writer is not None:
            writer.close()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(write_one, enumerate(paths)))


#: Of normalised numbers, which are float32 of about unit size.
_TOLERANCE = 2e-5

Array = npt.NDArray[Any]


def differences(
    dataset: Path, peer: Path, vocabularies: Mapping[str, pa.Table], categories: Sequence[str], counts: Sequence[str]
) -> list[str]:
    """Return the differences between our dataset and a peer's, a line each; empty: there are none.

    Args:
        dataset: our dataset's folder, with `train` and `valid`.
        peer: the peer's, and `vocabulary/COLUMN.parquet` (value, code).
        vocabularies: ours by column: value, code.
    """
    faults, translate = [], {}
    for name in categories:
        vocabulary = vocabularies[name]
        peer_vocabulary = pq.read_table(peer / "vocabulary" / f"{name}.parquet", columns=["value", "code"])
        position = pc.index_in(
            peer_vocabulary.column("value").cast(pa.string()), vocabulary.column("value")
        ).combine_chunks()
        if peer_vocabulary.num_rows != vocabulary.num_rows or position.null_count:
            lacks = vocabulary.num_rows - peer_vocabulary.num_rows + position.null_count
            faults.append(
                f"{name}: of our {vocabulary.num_rows} values it lacks {lacks}, {position.null_count} are its own"
            )
            continue
        codes = peer_vocabulary.column("code").to_numpy()
        table = np.arange(max(codes.max(initial=0) + 1, FIRST_CODE), dtype=np.int64)
        table[codes] = vocabulary.column("code").to_numpy()[position.to_numpy()]
        translate[name] = table
    for split in ("train", "valid"):
        sums = [0, 0]
        sides = [sorted((folder / split).rglob("*.parquet")) for folder in (dataset, peer)]
        for side, paths in enumerate(sides):
            for path in paths:
                for batch in pq.ParquetFile(path).iter_batches(1 << 17, columns=[*translate, "label"]):
                    sums[side] += _bag(batch, translate if side else {}, list(translate))
        if (sums[0] - sums[1]) % 2**64:
            faults.append(f"{split}: rows have other codes or labels")
        for name in counts:
            a, b = (np.sort(pq.read_table(list(map(str, p)), columns=[name]).column(0).to_numpy()) for p in sides)
            if len(a) != len(b):
                faults.append(f"{split}.{name}: {len(b)} rows, ours has {len(a)}")
            elif len(a) and (worst := float(np.abs(a - b).max())) > _TOLERANCE:
                faults.append(f"{split}.{name}: numbers differ by {worst:g}")
    return faults


def _bag(batch: pa.RecordBatch, translate: Mapping[str, Array], names: Sequence[str]) -> int:
    """Return the sum, modulo 2**64, of a hash of each row's codes and label."""
    hashes = batch.column(batch.schema.get_field_index("label")).to_numpy().astype(np.int64)
    for name in names:
        codes = batch.column(batch.schema.get_field_index(name)).to_numpy()
        hashes = xxhash64_integers(translate[name][codes] if translate else codes.astype(np.int64), hashes)
    return int(hashes.view(np.uint64).sum(dtype=np.uint64))


def textbook(spark: SparkSession, train: list[str], valid: list[str], out: Path, min_count: int) -> tuple[float, float]:
    """Measure (seconds of fit, seconds of transform and write) of the Criteo workflow over Parquet files."""
    rows = {"train": spark.read.parquet(*train), "valid": spark.read.parquet(*valid)}
    tick = time.perf_counter()
    tables: dict[str, DataFrame] = {}
    for name in CATEGORIES:
        counted = rows["train"].where(F.col(name).isNotNull()).groupBy(name).count().where(F.col("count") >= min_count)
        order = Window.orderBy(F.desc("count"), name)
        path = str(out / "vocabulary" / name)
        counted.select(name, (F.row_number().over(order) + 1).alias(f"{name}_code")).write.parquet(path)
        tables[name] = spark.read.parquet(path)
    logs = {n: F.log1p(F.greatest(F.coalesce(F.col(n), F.lit(0)), F.lit(0)).cast("double")) for n in COUNTS}
    aggregates = [f(x).alias(f"{k}{n}") for n, x in logs.items() for k, f in (("m", F.avg), ("s", F.stddev_samp))]
    learned = rows["train"].agg(*aggregates).collect()[0]
    fitted = time.perf_counter()
    for split, frame in rows.items():
        for name in CATEGORIES:
            frame = frame.join(F.broadcast(tables[name]), name, "left")
        codes = [
            F.when(F.col(n).isNull(), 0).otherwise(F.coalesce(F.col(f"{n}_code"), F.lit(1))).cast("int").alias(n)
            for n in CATEGORIES
        ]
        numbers = [
            ((x - F.lit(learned[f"m{n}"])) / F.lit(learned[f"s{n}"])).cast("float").alias(n) for n, x in logs.items()
        ]
        label = F.col("label").cast("float").alias("label")
        frame.select(*numbers, *codes, label).write.option("compression", "none").parquet(str(out / split))
    return fitted - tick, time.perf_counter() - fitted


#: A peer that takes longer is stopped and left out.
_PATIENCE_S = 1_800


@dataclass(frozen=True)
class Peer:
    """A program of bench/peers: what it is called in figures, its environment, its script, and ways to run it."""

    title: str
    environment: str
    script: str
    #: Leading arguments of each try besides the folder; the fastest counts.
    ways: tuple[tuple[str, ...], ...] = ((),)
    #: Whether it leaves what `differences` compares.
    checked: bool = False

    @property
    def python(self) -> Path:
        """Return the Python of the peers' environment."""
        return checkout() / "build" / "peers" / self.environment / "bin" / "python"


APART = {
    # NVTabular's schedulers: one process, and two worker processes.
    "nvtabular": Peer("NVTabular 23.8", "nvtabular", "etl_nvtabular.py", (("synchronous",), ("2",))),
    "duckdb": Peer("DuckDB 2.0", "duckdb-polars", "etl_duckdb.py", checked=True),
    "polars": Peer("Polars 2.1", "duckdb-polars", "etl_polars.py", checked=True),
}


@dataclass(frozen=True)
class Ran:
    """Time and memory that a peer took."""

    fit_s: float
    write_s: float
    peak_mib: float
    #: Processor time of all of it, the start of its Python included.
    cpu_s: float
    #: Where its dataset and its vocabularies are.
    folder: Path

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.fit_s + self.write_s


def run_apart(
    name: str, lake: Lake, out: Path, categories: Sequence[str], counts: Sequence[str], least: int, tries: int = 1
) -> Ran | None:
    """Return a peer's best try; None, and the reason printed, where it did not run.

    Args:
        name: one of APART.
        out: a new folder.
        least: rows that a value needs to get a code.
        tries: of each of the peer's ways.
    """
    peer = APART[name]
    if not peer.python.exists():
        print(f"left out: {peer.title} is not installed: make bench-etl-peers")
        return None
    runs = []
    for number, way in enumerate(peer.ways * tries):
        ran = _run_once(peer, way, lake, out / str(number), categories, counts, least)
        if isinstance(ran, str):
            print(f"left out: {ran}")
        else:
            runs.append(ran)
    return min(runs, key=lambda f: f.seconds) if runs else None


def _run_once(
    peer: Peer,
    way: tuple[str, ...],
    lake: Lake,
    out: Path,
    categories: Sequence[str],
    counts: Sequence[str],
    least: int,
) -> Ran | str:
    script = checkout() / "bench" / "peers" / peer.script
    files = [",".join(lake.paths(False)), ",".join(lake.paths(True))]
    workflow = [",".join(categories), ",".join(counts), str(least)]
    command = [str(peer.python), str(script), str(out), *way, *files, *workflow]
    name = " ".join((peer.title, *way))
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, text=True, start_new_session=True)
        try:
            with peak_of_tree(process.pid) as peak, cpu_of_children() as cpu:
                code = process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            return f"{name} took more than {_PATIENCE_S} s"
        finally:  # its workers too, whatever ended the wait
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        stdout.seek(0)
        stderr.seek(0)
        if code:
            return f"{name} ended with {code}: {stderr.read().strip().splitlines()[-1:]}"
        answer = json.loads(stdout.read().strip().splitlines()[-1])
    if answer["rows"] != lake.rows:
        return f"{name} wrote {answer['rows']} rows of {lake.rows}"
    return Ran(answer["fit"], answer["write"], peak.mib, cpu.seconds, out)
