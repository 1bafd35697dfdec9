"""Rows in the shape of Criteo's display advertising logs: 13 counts with nulls, 26 hashed categories with Zipf values.

Cardinalities are those of the Kaggle file (3 to 10 million values a column), so vocabularies grow with the rows as
real ones do. A day's rows depend on the seed and the day alone.

A `Lake` has them in a Delta table of a workspace of its own, and runs the Arrow engine's fit, transform and write over
the table's files.
"""

from __future__ import annotations

import shutil
import time
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from headrace.config import Spec, build_spec
from headrace.config.workspace import Workspace
from headrace.features.arrow.decode import LakeFile
from headrace.features.arrow.write_lake import write_lake_rows
from headrace.features.build.lake_files import files_of_day, fit_files
from headrace.features.layout.files import plan_files
from headrace.features.layout.split import split_rows
from headrace.features.vocabulary.delta_table import VocabularyTable
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.features.workflow.workflow import Workflow
from headrace.lake.delta.log import DataFile, DeltaLog
from headrace.storage import local

COUNTS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
CARDINALITIES = (
    1_460,
    583,
    10_131_227,
    2_202_608,
    305,
    24,
    12_517,
    633,
    3,
    93_145,
    5_683,
    8_351_593,
    3_194,
    27,
    14_992,
    5_461_306,
    10,
    5_652,
    2_173,
    4,
    7_046_547,
    18,
    15,
    286_181,
    105,
    142_572,
)
#: Shares of nulls of the Kaggle file, rounded.
COUNT_NULLS = (0.45, 0.0, 0.2, 0.2, 0.03, 0.2, 0.05, 0.0, 0.05, 0.45, 0.05, 0.75, 0.2)
CATEGORY_NULLS = (
    0,
    0,
    0.03,
    0.03,
    0,
    0.12,
    0,
    0,
    0,
    0,
    0,
    0.03,
    0,
    0,
    0,
    0.03,
    0,
    0,
    0.44,
    0.44,
    0.03,
    0.76,
    0,
    0.03,
    0.44,
    0.44,
)
FIRST_DAY = date(2026, 1, 1)
_ZIPF = 1.05
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)


def table_of_day(rows: int, day: int, seed: int = 1, files: int = 1) -> pa.Table:
    """Draw one day: label int32, I1..I13 int32, C1..C26 string, ts timestamp, _source_file, _source_line, ds."""
    rng = np.random.default_rng([seed, day])
    ds = FIRST_DAY + timedelta(days=day)
    columns: dict[str, pa.Array] = {"label": pa.array((rng.random(rows) < 0.256).astype(np.int32))}
    for i, name in enumerate(COUNTS):
        counts = np.floor(rng.lognormal(1.0 + 0.3 * (i % 5), 1.6, rows)).clip(0, 2_000_000).astype(np.int32)
        if i == 1:
            counts -= 3  # I2 is the one that has negative values
        columns[name] = pa.array(counts, mask=rng.random(rows) < COUNT_NULLS[i])
    for i, name in enumerate(CATEGORIES):
        values = hexadecimal(_hash(zipf(rng, CARDINALITIES[i], rows), i))
        if CATEGORY_NULLS[i]:
            values = pc.if_else(pa.array(rng.random(rows) < CATEGORY_NULLS[i]), None, values)
        columns[name] = values
    start = np.datetime64(ds.isoformat(), "us")
    ts = start + np.sort(rng.integers(0, 86_400_000_000, rows)).astype("timedelta64[us]")
    columns["ts"] = pa.array(ts).cast(pa.timestamp("us", tz="UTC"))
    source = np.arange(rows) * files // max(rows, 1)
    names = pa.array([f"landing/criteo/{ds}/part-{k}.txt" for k in range(files)])
    columns["_source_file"] = pa.DictionaryArray.from_arrays(pa.array(source.astype(np.int32)), names).cast(pa.string())
    columns["_source_line"] = pa.array(np.arange(rows, dtype=np.int64))
    columns["ds"] = pa.array([ds.isoformat()] * rows)
    return pa.table(columns)


def zipf(rng: np.random.Generator, cardinality: int, rows: int) -> npt.NDArray[np.int64]:
    """Draw ranks 0..cardinality-1 with density rank**-1.05, by the inverse of the continuous distribution's CDF."""
    power = 1 - _ZIPF
    top = (float(cardinality) + 1) ** power - 1
    return np.minimum(((rng.random(rows) * top + 1) ** (1 / power)).astype(np.int64) - 1, cardinality - 1)


def _hash(ranks: npt.NDArray[np.int64], column: int) -> npt.NDArray[np.uint32]:
    """Return 32 bits of splitmix64 (Steele et al., 2014) of rank and column."""
    with np.errstate(over="ignore"):
        z = ranks.astype(np.uint64) + np.uint64(column + 1) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((z ^ (z >> np.uint64(31))) >> np.uint64(32)).astype(np.uint32)


def hexadecimal(values: npt.NDArray[np.uint32]) -> pa.StringArray:
    """Return the values as eight hex digits each."""
    nibbles = (values[:, None] >> np.arange(28, -1, -4, dtype=np.uint32)) & np.uint32(15)
    offsets = np.arange(len(values) + 1, dtype=np.int32) * 8
    return pa.StringArray.from_buffers(
        len(values), pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(_HEX[nibbles]))
    )


def write_days(folder: Path, rows: int, days: int = 8) -> list[Path]:
    """Write `days` Parquet files of equal size, rows in all."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for day in range(days):
        paths.append(folder / f"day-{day}.parquet")
        pq.write_table(table_of_day(rows * (day + 1) // days - rows * day // days, day), paths[-1])
    return paths


DAYS = 8
DS = "2026-01-08"
MIN_COUNT = 15
_META = "_source_file string, _source_line bigint, ds string"


def spec_of(categories: tuple[str, ...] = CATEGORIES, counts: tuple[str, ...] = COUNTS, least: int = MIN_COUNT) -> Spec:
    """Return the pipeline of these columns."""
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

    def __init__(self, spark: SparkSession, folder: Path, raw: list[Path] | DataFrame, rows: int) -> None:
        self.ws, self.rows, self._spark = Workspace(folder / "home"), rows, spark
        self.table = self.ws.table("etl", "events")
        frame = raw if isinstance(raw, DataFrame) else spark.read.parquet(*map(str, raw))
        frame.write.format("delta").partitionBy("ds").save(str(self.table))

    @property
    def files(self) -> list[DataFile]:
        files = DeltaLog(self.table).files(0)
        assert files is not None
        return files

    def paths(self, valid: bool) -> list[str]:
        """Return data files of the last day, or of those before."""
        return [str(f.path) for f in self.files if (f.partition["ds"] == DS) == valid]

    def features(self, spec: Spec, out: Path) -> tuple[float, float, FittedWorkflow]:
        """Run the Arrow engine; return (seconds of fit, seconds of transform and write, what was learned); codes from
        none.
        """
        workflow = Workflow.from_spec(spec)
        self.ws.table("etl", "vocabulary").remove()
        # The frame is not looked at: files are.
        split = split_rows(spec, self._spark.createDataFrame([], spec.table.spark_schema + ", " + _META), DS)
        vocabularies = VocabularyTable(self._spark, self.ws.table("etl", "vocabulary"), DS)
        with (
            files_of_day(spec, self.ws, DS, local(self.table), 0, workflow, split) as files,
            vocabularies.in_background(),
        ):
            assert files is not None
            tick = time.perf_counter()
            counts, fitted = fit_files(workflow, files, split, vocabularies, self._spark, "etl")
            done = time.perf_counter()
            with local(out).new_folder() as folder:
                fitted.save(folder / "workflow")
                plans = plan_files(counts, spec.features.row_group_rows, spec.features.min_row_groups)
                written = write_lake_rows(fitted, files, plans, folder, folder / "workflow", self._spark)
                vocabularies.wait()
            assert sum(f.rows for f in written.files) == self.rows
            return done - tick, time.perf_counter() - done, fitted

    def forget(self, days: int = DAYS) -> None:
        """Remove what was decoded of the newest days."""
        folder = next(p for p in self.ws.encoded("etl").local_path().iterdir() if not p.name.startswith("scratch"))
        if days == DAYS:
            shutil.rmtree(folder)
            return
        newest = sorted({f.partition["ds"] or "" for f in self.files})[-days:]
        for file in self.files:
            if file.partition["ds"] in newest:
                shutil.rmtree(folder / LakeFile(file.path, 0).key)
