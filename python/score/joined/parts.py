"""How a frame is cut whose tasks are given rows of tables."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

#: Parts for each core, so that cores finish together; and the most rows of a part, in the mean.
_PARTS_A_CORE = 4
_PART_ROWS = 1_000_000


@dataclass(frozen=True)
class Parts:
    """Its own columns alone say which part a row is in."""

    #: Of a row: int, from 0.
    number: Column
    count: int
    #: The order of a part's rows.
    order: Column

    @staticmethod
    def by_hash(key: Column, count: int) -> Parts:
        """By a hash of a key, in its order."""
        return Parts(F.pmod(F.hash(key), F.lit(count)), count, key)

    @staticmethod
    def by_range(number: Column, end: int, count: int) -> Parts:
        """Rows that have numbers from 0 to below `end`, in their order: those of a part are below those of the next."""
        first = F.floor(number.cast("bigint") * F.lit(count) / F.lit(end))
        return Parts(F.least(first, F.lit(count - 1)).cast("int"), count, number)


def parts_of(spark: SparkSession, rows: int) -> int:
    """How many parts a frame of so many rows has, at least one."""
    return max(1, min(rows, max(_PARTS_A_CORE * spark.sparkContext.defaultParallelism, -(-rows // _PART_ROWS))))
