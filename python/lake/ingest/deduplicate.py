"""Rows that are one event: equal in `table.keys`. The first is kept, in order of (day, file, line).

A row is dropped when an equal one comes before it on its own day; when an equal one was kept on one of the `late_days`
days before it; or when one is in the table on one of the `late_days` days after it (which can be where a day is loaded
after the days that follow it). So no two rows of the table within `late_days` days of each other are equal, whatever
the order of loading. As SQL's UNIQUE has it, a row with a null in a key equals no other.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from headrace.config import Table
from headrace.lake.sources.frame import GOOD, quoted

_NEVER = -(1 << 30)
_DAYS = "struct<last:int,dropped:array<int>>"


def duplicates(rows: DataFrame, loaded: DataFrame | None, table: Table) -> DataFrame:
    """The good rows to drop.

    Args:
        rows: rows to load (headrace.lake.ingest.typed_rows).
        loaded: the keys and `ds` of rows that are in the table already and stay, from the days within `late_days` of
            those of `rows`; None: days are not compared with each other (snapshots).
        table: keys and late_days.

    Returns:
        `_ds`, `_file`, `_line`, `_copy`.
    """
    keys = quoted(table.keys)
    named = [F.col(k).alias(f"k{i}") for i, k in enumerate(keys)]
    day = F.datediff(F.col("_ds").cast("date"), F.lit("1970-01-01").cast("date")).alias("day")
    position = ["_ds", "_file", "_line", "_copy"]
    mine = rows.where(F.col("_state") == GOOD).select(*named, day, F.lit(False).alias("kept"), *position)
    everything = mine
    if loaded is not None:
        then = F.datediff(F.col("ds").cast("date"), F.lit("1970-01-01").cast("date")).alias("day")
        nothing = [F.lit(None).cast(dict(mine.dtypes)[c]).alias(c) for c in position]
        everything = mine.unionByName(loaded.select(*named, then, F.lit(True).alias("kept"), *nothing))
    k = [f"k{i}" for i in range(len(keys))]
    everything = everything.dropna(subset=k).withColumn("hash", F.xxhash64(*k))
    # Most keys are there once: only 8 bytes of each row are shuffled to find those that are not.
    repeated = everything.groupBy("hash").count().where("count > 1").select("hash")
    suspects = everything.join(repeated, "hash", "left_semi")
    in_order = Window.partitionBy(*k, "day").orderBy(F.desc("kept"), "_file", "_line", "_copy")
    suspects = suspects.select("*", F.row_number().over(in_order).alias("nth"))
    repeat = (F.col("nth") > 1) & ~F.col("kept")
    if loaded is not None and table.late_days:
        of_key = Window.partitionBy(*k)
        first = F.when(F.col("nth") == 1, F.struct("day", "kept"))
        suspects = suspects.select("*", F.sort_array(F.collect_list(first).over(of_key)).alias("days"))
        repeat = repeat | (~F.col("kept") & _on_another_day(table.late_days))
    return suspects.where(repeat).select(*position)


def _on_another_day(late_days: int) -> Column:
    """Whether the row's `day` is one on which its key, which occurs on `days`, is a repetition."""
    start = F.struct(F.lit(_NEVER).alias("last"), F.array().cast("array<int>").alias("dropped")).cast(_DAYS)

    def step(state: Column, one: Column) -> Column:
        kept = F.struct(one["day"].alias("last"), state["dropped"].alias("dropped"))
        dropped = F.struct(state["last"].alias("last"), F.array_append(state["dropped"], one["day"]).alias("dropped"))
        near = one["day"] - state["last"] <= late_days
        return F.when(~one["kept"] & near, dropped).otherwise(kept).cast(_DAYS)

    before = F.array_contains(F.aggregate("days", start, step)["dropped"], F.col("day"))
    after = F.exists(
        "days", lambda one: one["kept"] & (one["day"] > F.col("day")) & (one["day"] - F.col("day") <= late_days)
    )
    return (F.size("days") > 1) & (before | after)
