"""Users and items that a named source lists, and that have no events in the training window: new ones."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headrace.config import Entity
from headrace.features.functions.spark_expressions import col
from headrace.features.layout.split import SPLIT
from headrace.features.table_ops.spark_windows import EVENT_MICROS


def with_listed(side: DataFrame, entity: Entity, events: DataFrame, rows: DataFrame) -> DataFrame:
    """One side with the keys that a source lists besides, each with what its newest row has of the columns.

    Args:
        side: the key and the columns, of those that are active (`entity.limit` of them at most).
        entity: the side's section.
        events: with the column `__split`: who has some in the training rows is not new.
        rows: of the source, with EVENT_MICROS. Columns that it lacks are null, and values that are none of the
            column's type; a row whose key is none is left out.
    """
    types, there = dict(side.dtypes), set(rows.columns)
    columns = [c for c in side.columns if c != entity.key]
    values = F.struct(
        F.lit(0).alias("0"),
        *((col(c) if c in there else F.lit(None)).try_cast(types[c]).alias(str(i)) for i, c in enumerate(columns, 1)),
    )
    # Of several rows of a time the greatest: the same one in every run.
    key = col(entity.key).try_cast(types[entity.key])
    listed = rows.where(key.isNotNull()).groupBy(key.alias("key"))
    found = listed.agg(F.max(F.struct(F.col(EVENT_MICROS).alias("at"), values.alias("values"))).alias("newest"))
    active = events.where(F.col(SPLIT) == "train").select(col(entity.key).alias("active")).distinct()
    new = found.join(active, F.col("key") == F.col("active"), "left_anti")
    return side.unionByName(
        new.select(
            F.col("key").alias(entity.key),
            *(F.col("newest.values").getField(str(i)).alias(c) for i, c in enumerate(columns, 1)),
        )
    )
