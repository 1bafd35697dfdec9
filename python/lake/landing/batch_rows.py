"""Rows of a batch of landing files: what its tasks have read, which rows repeat others, and what is written of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headrace.config.schema import is_of_list, quoted_names
from headrace.config.source import following
from headrace.errors import UserError
from headrace.lake.delta.data_files import WrittenFile
from headrace.lake.delta.log import DeltaLog, check_files
from headrace.lake.delta.with_spark import read_version
from headrace.lake.faults import GOOD, SKIPPED
from headrace.lake.landing.arrow_rows import ArrowRows, arrow_plan, read_by_arrow, spark_paths, typed_files
from headrace.lake.landing.compression import COMPRESSIONS, UNREADABLE_ENDINGS
from headrace.lake.landing.expectations import FileProfile, empty_profiles
from headrace.lake.landing.files import LandingDay
from headrace.lake.landing.formats import POSITION, FileRefused, LandingBatch, LandingReader, reader_of
from headrace.lake.landing.plan import LoadPlan
from headrace.lake.landing.repeats import repeated_rows
from headrace.lake.landing.source_context import SourceContext
from headrace.lake.landing.write_rows import Dropped, TypedRowsTask, codec_of
from headrace.lake.spark.session import spark_settings
from headrace.lake.spark.tasks import run_tasks
from headrace.storage import Location

_LOG = logging.getLogger("headrace.lake")
#: As few rows that were judged one by one are written by the driver.
_FEW = 50_000


@dataclass(frozen=True)
class Places:
    """Places of rows that are not loaded."""

    #: Parquet files with `_ds`, `_file`, `_line`, `_copy`; None: there are no such rows.
    folder: Location | None

    @staticmethod
    def stage(rows: DataFrame | None, folder: Location) -> Places:
        """Write the places to a folder, so that they are computed once."""
        if rows is None:
            return Places(None)
        rows.write.parquet(folder.spark_path)
        return Places(folder)

    @cached_property
    def table(self) -> pa.Table:
        """The places."""
        schema = pa.schema([("_ds", pa.string()), *((n, pa.int64()) for n in POSITION)])
        if self.folder is None:
            return schema.empty_table()
        return pq.read_table(self.folder.local_path(), partitioning=None).select(schema.names).cast(schema)

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """Rows by day."""
        days, rows = self.table.column("_ds").value_counts().flatten()
        return dict(zip(days.to_pylist(), rows.to_pylist(), strict=True))

    def exclude_from(self, rows: DataFrame) -> DataFrame:
        """Return the rows of a frame that stand at none of the places."""
        if self.folder is None or not self.table.num_rows:
            return rows
        places = rows.sparkSession.read.parquet(self.folder.spark_path).drop("_ds")
        return rows.join(places, list(POSITION), "left_anti")


@dataclass(frozen=True)
class JudgedRows:
    """The rows of a batch."""

    ctx: SourceContext
    plan: LoadPlan
    batch: LandingBatch
    #: Read by tasks.
    arrow: ArrowRows
    #: Whether those judged one by one are few: the driver itself writes them.
    few: bool
    #: Of a format that makes rows anew (`LandingReader.finish`): its rows, which `arrow` has as judged ones.
    finished: DataFrame | None = None

    def profiles(self) -> list[FileProfile]:
        """Return the profile of each file."""
        files = [self.arrow.profile(i, f) for i, f in enumerate(empty_profiles(self.ctx.table, self.batch))]
        if self.finished is not None:
            _recount(self.finished, self.batch, files)
        return files

    def duplicates(self, deleted: Places, left_out: Collection[str]) -> DataFrame | None:
        """Return the good rows to drop (headrace.lake.landing.repeats).

        Args:
            deleted: rows that are not loaded anyway.
            left_out: days that are not loaded.
        """
        table = self.ctx.table
        if not table.keys:
            return None
        near = near_files(self.ctx, self.plan, self.batch.days, left_out)
        if near is None or deleted.table.num_rows:
            good_rows = self.good_rows(quoted_names(table.keys))
            if good_rows is None:
                return None
            rows = deleted.exclude_from(self._of_loaded_days(good_rows, left_out))
            return repeated_rows(rows, self._loaded(left_out), table)
        judged = self.arrow.judged_paths
        suspects = self.arrow.suspects(judged, near)
        if suspects is None:
            return None
        spark, keys = self.batch.spark, quoted_names(table.keys)
        frames: list[DataFrame] = []
        if suspects[0]:
            arrow_rows = spark.read.parquet(*spark_paths(suspects[0]))
            frames.append(arrow_rows.select("*", F.lit(0).alias("_copy"), F.lit(GOOD).alias("_state")))
        if judged:
            frame = spark.read.parquet(*spark_paths(judged))
            frames.append(frame.select(*keys, "_ds", "_file", "_line", "_copy", "_state"))
        new_rows = self._of_loaded_days(reduce(DataFrame.unionByName, frames), left_out)
        loaded = None
        if self.ctx.source.daily:
            none = new_rows.select(*keys, F.col("_ds").alias("ds")).limit(0)
            loaded = spark.read.parquet(*spark_paths(suspects[1])).select(*keys, "ds") if suspects[1] else none
        return repeated_rows(new_rows, loaded, table)

    def good_rows(self, columns: Sequence[str] = ()) -> DataFrame | None:
        """Return the good rows, see `ArrowRows.good_rows`."""
        return self.arrow.good_rows(self.batch, columns)

    def drop_rows(self, dropped: Dropped) -> JudgedRows:
        """Return the same batch; Arrow's data files lack some rows."""
        return replace(self, arrow=self.arrow.drop_rows(dropped))

    def write_typed(
        self,
        days: Sequence[str],
        table: Location,
        schema: pa.Schema,
        dropped: Dropped,
        extra: Sequence[str],
        bad: bool = False,
    ) -> list[WrittenFile]:
        """Write data files of the good rows that were judged one by one, or of the bad ones; no commit names them
        yet.
        """
        work = tuple((ds, file) for ds, file in self.arrow.judged_files if ds in days)
        task = TypedRowsTask(work, dropped, table, schema, extra, codec_of(self.batch.spark), bad)
        return [WrittenFile(**f) for f in run_tasks(None if self.few else self.batch.spark, len(work), task)]

    def _of_loaded_days(self, rows: DataFrame, left_out: Collection[str]) -> DataFrame:
        return rows.where(~F.col("_ds").isin(sorted(left_out))) if left_out else rows

    def _loaded(self, left_out: Collection[str]) -> DataFrame | None:
        """Return the keys of rows of the table that the batch's are compared with (see `near_files`), by Spark."""
        if not self.ctx.source.daily:
            return None
        first, last, pending = _nearby(self.ctx, self.plan, self.batch.days, left_out)
        version = DeltaLog(self.ctx.events).version
        assert version is not None, "made before anything is loaded"
        near = read_version(self.batch.spark, self.ctx.events, version, _between(first, last, pending))
        near = near.where(F.col("ds").between(first, last) & ~F.col("ds").isin(sorted(pending)))
        return near.select(*(F.col(k) for k in quoted_names(self.ctx.table.keys)), "ds")


def _recount(rows: DataFrame, batch: LandingBatch, files: list[FileProfile]) -> None:
    """Count the rows of files anew that a format has made of judged ones (`LandingReader.finish`); bad rows stay.

    Args:
        rows: the rows.
        batch: of the files.
        files: their profiles, which are changed.
    """
    table = batch.table
    null_columns, columns = list(table.expectations.null_rate), [c.name for c in table.columns]
    good, is_row = F.col("_state") == GOOD, F.col("_state") != SKIPPED
    aggregates = [
        F.count_if(is_row & (F.col("_copy") == 0)).alias("read"),
        F.count_if(is_row & (F.col("_copy") > 0)).alias("expanded"),
        F.count_if(good).alias("good"),
        *(F.count_if(good & F.col(q).isNull()).alias(f"n{i}") for i, q in enumerate(quoted_names(null_columns))),
        *(F.count_if(is_row & F.col(q).isNotNull()).alias(f"c{i}") for i, q in enumerate(quoted_names(columns))),
    ]
    for row in rows.groupBy("_file").agg(*aggregates).collect():
        profile = files[row["_file"]]
        profile.read, profile.expanded = row["read"] + profile.forgotten, row["expanded"]
        profile.good = row["good"]
        profile.readable = {name: row[f"c{i}"] for i, name in enumerate(columns)}
        profile.nulls = {name: row[f"n{i}"] for i, name in enumerate(null_columns)}


def read_batch(ctx: SourceContext, plan: LoadPlan, batch: LandingBatch, staging: Location) -> JudgedRows:
    """Read the files of a batch once.

    Raises:
        FileDamaged: one cannot be read to its end.
        UserError: a header or a name that is refused, a declaration that does not suit the format.
    """
    reader = checked_reader(batch)
    declared = {c.name for c in batch.table.columns}
    columns = DeltaLog(ctx.events).columns()
    undeclared = [n for n, t in columns.items() if n not in declared and n != "ds" and not n.startswith("_")]
    read_plan = arrow_plan(batch, [n for n in undeclared if columns[n] == "string"])
    codec, folder = codec_of(batch.spark), staging / "arrow"
    arrow = read_by_arrow(batch, read_plan, ctx.events, folder, codec, ctx.forgotten)
    if not reader.remakes_rows or not arrow.judged_files:
        return JudgedRows(ctx, plan, batch, arrow, arrow.judged <= _FEW)
    rows = arrow.judged_rows(batch.spark)
    assert rows is not None
    finished = _stage(reader.finish(rows, batch), staging / "finished")
    files = typed_files(staging / "finished", [day.ds for day in batch.days])
    return JudgedRows(ctx, plan, batch, replace(arrow, judged_files=tuple(files)), arrow.judged <= _FEW, finished)


def near_files(
    ctx: SourceContext, plan: LoadPlan, days: Sequence[LandingDay], left_out: Collection[str]
) -> list[tuple[str, Location]] | None:
    """Return (day, data file) of the rows that those of `days` are compared with: of loaded days nearby that stay.

    Those still to be loaded again are compared when their turn comes. None: Spark must read them.
    """
    if not ctx.table.keys or not ctx.source.daily:
        return []
    log = DeltaLog(ctx.events)
    files = log.plain_files(log.version) if log.version is not None else []
    if files is None:
        return None
    first, last, pending = _nearby(ctx, plan, days, left_out)
    near = [f for f in files if first <= str(f.partition.get("ds")) <= last and f.partition.get("ds") not in pending]
    check_files(ctx.events, near)
    return [(str(f.partition.get("ds")), f.path) for f in near]


def _between(first: str, last: str, pending: set[str]) -> Callable[[Mapping[str, str | None]], bool]:
    """Return a test of whether rows of a partition are compared with."""
    return lambda partition: first <= str(partition.get("ds")) <= last and partition.get("ds") not in pending


def _nearby(
    ctx: SourceContext, plan: LoadPlan, days: Sequence[LandingDay], left_out: Collection[str]
) -> tuple[str, str, set[str]]:
    """Return (first day, last day, those between that do not count)."""
    late = ctx.table.late_days
    pending = {d.ds for d in plan.days if d.ds >= days[0].ds} - set(left_out)
    return following(days[0].ds, -late), following(days[-1].ds, late), pending


def checked_reader(batch: LandingBatch) -> LandingReader:
    """Return the reader of the batch's landing files, whose format is checked against the declared columns.

    Raises:
        FileRefused: a file is compressed in a way that cannot be read.
        UserError: a column that the format needs is not declared, or one is declared as the format has none.
    """
    for _, file in batch.files:
        if (suffix := file.path.suffix.lower()) in UNREADABLE_ENDINGS:
            raise FileRefused(
                file,
                f"landing file {file.name}: files that end in {suffix} cannot be read; deliver it plain, or compressed "
                f"as one of {', '.join(COMPRESSIONS)}",
            )
    known = batch.source.file_format
    declared = {c.name for c in batch.table.columns}
    for name in known.columns:
        if name not in declared:
            raise UserError(f"source.format '{batch.source.format}' needs column '{name}' in table.columns")
    for c in batch.table.columns:
        if c.path is not None and not known.paths:
            raise UserError(
                f"table.columns: '{c.name}' has a path, but the fields of '{batch.source.format}' have none"
            )
        if not known.list_paths and any(map(is_of_list, c.steps)):
            raise UserError(
                f"table.columns: '{c.name}': path {c.path} leads into a list, which is read of tables and of "
                f"'jsonl', and not of '{batch.source.format}': have the writer flatten it, or declare the list itself"
            )
    return reader_of(batch.source)


def _stage(frame: DataFrame, folder: Location) -> DataFrame:
    spark = frame.sparkSession
    # As Arrow reads them; a time of 96 bits is Spark's own.
    with spark_settings(spark, {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"}):
        frame.write.parquet(folder.spark_path)
    return spark.read.schema(frame.schema).parquet(folder.spark_path)
