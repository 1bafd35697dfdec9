"""Rows that others have deleted from the table: they stay out when their day is loaded again from the same files."""

from __future__ import annotations

from functools import reduce

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.errors import UserError
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.with_spark import read_version
from headrace.lake.ingest.day_files import DayFiles
from headrace.lake.ingest.load_history import row_counts
from headrace.lake.ingest.plan import LoadPlan
from headrace.lake.ingest.source_context import SourceContext
from headrace.lake.sources.frame import GOOD
from headrace.lake.sources.reader import reader_of
from headrace.storage import Location


def withheld_rows(ctx: SourceContext, plan: LoadPlan, rows: DataFrame, days: list[DayFiles]) -> DataFrame | None:
    """The good rows of unchanged files that are neither in the events nor in the quarantine.

    Deleted ones, that is, and those that were dropped as duplicates: of a deleted one, perhaps. Needs no version of the
    table from before the deletion, which a VACUUM takes away.

    Args:
        ctx: of the source.
        plan: of the run.
        rows: typed rows (headrace.lake.ingest.typed_rows).
        days: whose they are.

    Returns:
        `_ds`, `_file`, `_line`, `_copy`; None where no such day is among `days`.

    Raises:
        UserError: a format that makes several rows of a line, of which some may be deleted.
    """
    spark = rows.sparkSession
    mine = [d for d in days if d.ds in plan.withhold]
    if not mine:
        return None
    if reader_of(ctx.landing_source).remakes_rows:
        raise UserError(
            f"rows of {mine[0].ds} were deleted from {ctx.events}, and format "
            f"'{ctx.landing_source.format}' draws rows anew when it is loaded again: deleted ones could come back. "
            f"Deliver landing files without them"
        )
    unchanged = [(d.ds, name) for d in mine for name in sorted(d.unchanged)]
    files = spark.createDataFrame(unchanged, "_ds string, _source_file string")
    known = [_positions(spark, ctx.events, None, mine)]
    for day in mine:
        # The version of the load, where it is there: a run that was killed has written a newer one.
        version = day.record.quarantine if day.record is not None else -1
        there = version >= 0 and row_counts(DeltaLog(ctx.quarantine), version, {day.ds}) is not None
        known.append(_positions(spark, ctx.quarantine, version if there else None, [day]))
    good = rows.where((F.col("_state") == GOOD) & F.col("_ds").isin([d.ds for d in mine]))
    good = good.join(F.broadcast(files), ["_ds", "_source_file"], "left_semi")
    good = good.join(reduce(DataFrame.unionByName, known), ["_ds", "_source_file", "_line"], "left_anti")
    return good.select("_ds", "_file", "_line", "_copy")


def _positions(spark: SparkSession, table: Location, version: int | None, days: list[DayFiles]) -> DataFrame:
    """The landing lines of a table's rows."""
    mine = [d.ds for d in days]
    newest = DeltaLog(table).version if version is None else version
    assert newest is not None, "the day was loaded before"
    rows = read_version(spark, table, newest, lambda of: of.get("ds") in mine)
    rows = rows.where(F.col("ds").isin(mine))
    return rows.select(F.col("ds").alias("_ds"), "_source_file", F.col("_source_line").alias("_line"))
