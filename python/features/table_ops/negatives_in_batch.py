"""Where `negatives` with `method: in_batch` draws from: positives dealt into batches by the hash of their identity.

A row's batch and every place in it are the same whatever the files and the schedule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.features.table_ops.base import FILE, LINE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def spark_batches(pool: DataFrame, draws: DataFrame, item: Column, rows: int, seed: int) -> tuple[DataFrame, DataFrame]:
    """The pool's items by batch and place, and the draws of the batches that are not empty.

    Args:
        pool: positives of the training range, with META.
        draws: rows of positives, with META.
        item: the item's column of both.
        rows: positives a batch, about.

    Returns:
        (__b, __slot, __item), slots 0 .. __size - 1 of each batch __b; the draws with __b and __size.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    name = F.concat(F.col(FILE), F.lit(":"), F.col(LINE).cast("string"), F.lit(_salt(seed)))
    batch = F.pmod(F.xxhash64(name), F.col("__batches")).alias("__b")
    number = F.call_function("div", F.count(F.lit(1)) + F.lit(rows - 1).cast("bigint"), F.lit(rows).cast("bigint"))
    batches = pool.agg(F.greatest(number, F.lit(1).cast("bigint")).alias("__batches"))
    dealt = pool.crossJoin(F.broadcast(batches)).select(item.alias("__item"), batch, FILE, LINE)
    place = F.row_number().over(Window.partitionBy("__b").orderBy(FILE, LINE)) - 1
    slots = dealt.select("__b", place.cast("bigint").alias("__slot"), "__item")
    sizes = dealt.groupBy("__b").agg(F.count(F.lit(1)).alias("__size"))
    draws = draws.crossJoin(F.broadcast(batches)).select("*", batch).join(sizes, "__b")
    return slots, draws


def _salt(seed: int) -> str:
    """So that a row's batch says nothing of its draws."""
    return f":batch:{seed}"
