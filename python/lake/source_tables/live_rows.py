"""Rows that changes have brought and that no later change took away."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql import types as T

from headrace.config.source import RowChange
from headrace.lake.sources.frame import quoted

#: Columns of a change data feed.
TYPE, VERSION = "_change_type", "_commit_version"
INSERT, BEFORE, AFTER, DELETE = "insert", "update_preimage", "update_postimage", "delete"
#: Columns of `live_rows`.
ROW, COPY = "__row", "__copy"
#: Types that Spark does not hash, or whose nulls it does not tell apart.
_NESTED = (T.ArrayType, T.MapType, T.StructType, T.VariantType)


def live_rows(
    changes: DataFrame, schema: T.StructType, key: Column | None, *, updates: RowChange, deletes: RowChange
) -> DataFrame:
    """What is left of some changes.

    A row that is taken away is the newest one with its values. So which one it is does not depend on whether older
    changes are among these.

    Args:
        changes: `_change_type`, `_commit_version` and the columns of the table.
        schema: the columns of the table.
        key: bigint; rows with the same one are taken for the same row, whatever their values; null: the values count.
            Given where updates are ignored, for what is deleted then has other values than what was inserted.
        updates: `ignore`: rows stay as they were inserted.
        deletes: `ignore`: rows stay.

    Returns:
        the columns of `changes`; ROW bigint, a hash of the row; COPY int, from 1: the how many-th of a commit with this
        hash.
    """
    added = [INSERT] if updates == "ignore" else [INSERT, AFTER]
    gone = [] if updates == "ignore" else [BEFORE]
    gone += [] if deletes == "ignore" else [DELETE]
    values = _hash(schema)
    row = values if key is None else F.coalesce(key, values)
    named = changes.where(F.col(TYPE).isin(added + gone)).select("*", values.alias("__values"), row.alias(ROW))
    comes = F.col(TYPE).isin(added)
    of_commit = Window.partitionBy(ROW, VERSION, "__comes").orderBy("__values")
    named = named.select("*", comes.alias("__comes")).select("*", F.row_number().over(of_commit).alias(COPY))
    if not gone:
        return named
    # What a commit takes away was there before what it brings. Depths are as of nested brackets.
    order = Window.partitionBy(ROW).orderBy(VERSION, "__comes", COPY)
    step = F.when(F.col("__comes"), 1).otherwise(-1)
    deep = F.sum(step).over(order.rowsBetween(Window.unboundedPreceding, Window.currentRow))
    named = named.select("*", deep.alias("__depth"))
    least = F.min("__depth").over(order.rowsBetween(1, Window.unboundedFollowing))
    stays = F.coalesce(least >= F.col("__depth"), F.lit(True))
    return named.select("*", stays.alias("__stays")).where(F.col("__comes") & F.col("__stays"))


def _hash(schema: T.StructType) -> Column:
    """Of all values, nulls included."""
    columns = [F.col(quoted([f.name])[0]) for f in schema.fields]
    whole = [
        F.to_json(F.struct(c.alias("v"))) if isinstance(f.dataType, _NESTED) else c
        for c, f in zip(columns, schema.fields, strict=True)
    ]
    # xxhash64 leaves nulls out, so where they are is hashed, too.
    return F.xxhash64(*whole, *(c.isNull() for c in columns))
