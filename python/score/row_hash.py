"""Hashes of rows of a frame: equal of equal rows, to the bit of each value."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, DoubleType, FloatType

from headrace.features.functions.spark_expressions import col


def row_hashes(frame: DataFrame, columns: Sequence[str], names: Sequence[str], *first: Column) -> list[Column]:
    """64-bit hashes of some columns, as many as `names`, independent of each other: bigint each, never null.

    Args:
        frame: has the columns.
        columns: scalars or arrays of scalars.
        names: of the hashes.
        first: values, never null, that are hashed before them.
    """
    values = [x for c in columns for x in _hashed(frame.schema[c].dataType, col(c))]
    return [F.xxhash64(F.lit(seed), *first, *values).alias(name) for seed, name in enumerate(names)]


def _hashed(type_: DataType, value: Column) -> list[Column]:
    """What tells a value from each other one: Spark's hash passes over nulls, and over the ends of arrays."""
    if isinstance(type_, ArrayType):
        nulls = F.transform(value, lambda x: x.isNull())
        return [value.isNull(), F.coalesce(F.size(value), F.lit(0)), nulls, _exact(type_.elementType, value, True)]
    return [value.isNull(), _exact(type_, value, False)]


def _exact(type_: DataType, value: Column, is_array: bool) -> Column:
    """-0 and 0 have one hash: as text they differ."""
    if not isinstance(type_, (FloatType, DoubleType)):
        return value
    return F.transform(value, lambda x: x.cast("string")) if is_array else value.cast("string")
