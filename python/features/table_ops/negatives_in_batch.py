"""Where `negatives` with `method: in_batch` draws from: positives dealt into batches by the hash of their identity.

Both bodies deal alike, so a row's batch and every place in it are the same whatever the engine, the files and the
schedule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.features.table_ops.arrow_windows import I64, hashes, one, places
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


class ArrowBatches:
    """The same of rows of a table."""

    def __init__(self, table: pa.Table, pool: I64, rows: int, seed: int) -> None:
        """`pool`: rows of the table that are positives of the training range."""
        number = max(1, -(-len(pool) // rows))
        file, line = one(table, FILE), one(table, LINE)
        name = pc.binary_join_element_wise(file, line.cast(pa.string()), pa.scalar(_salt(seed)[1:]), ":")
        #: By row of the table.
        self._batch: I64 = hashes(name) % number
        first, second = places(table.num_rows, file, line)
        order = np.lexsort((second[pool], first[pool], self._batch[pool]))
        self._pool: I64 = pool[order]
        self._start: I64 = np.searchsorted(self._batch[self._pool], np.arange(number + 1))

    def sizes(self, rows: I64) -> I64:
        """How many of the pool are in each row's batch."""
        batch = self._batch[rows]
        found: I64 = self._start[batch + 1] - self._start[batch]
        return found

    def at(self, rows: I64, slot: I64) -> I64:
        """The row of the pool at a slot of each row's batch."""
        found: I64 = self._pool[self._start[self._batch[rows]] + slot]
        return found


def _salt(seed: int) -> str:
    """So that a row's batch says nothing of its draws."""
    return f":batch:{seed}"
