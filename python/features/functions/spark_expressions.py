"""Spark expressions of columns as operators see them."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F

from headrace.config.schema import column
from headrace.features.types import ValueType


def col(name: str) -> Column:
    """Return a column by its exact name, dots and all."""
    return column(name)


def input_column(name: str, input_type: ValueType) -> Column:
    """Return an input column as operators see it: NaN is null, a null list is empty."""
    x = col(name)
    real = input_type.element in ("float", "double")
    if input_type.is_list:
        x = F.coalesce(x, F.array().cast(f"array<{input_type.element}>"))
        return F.transform(x, nan_to_null) if real else x
    return nan_to_null(x) if real else x


def is_missing(name: str, input_type: ValueType) -> Column:
    """Return a boolean: no value (null, NaN, an empty list)."""
    x = input_column(name, input_type)
    return F.size(x) == 0 if input_type.is_list else x.isNull()


def nan_to_null(x: Column) -> Column:
    """Return a floating-point number, null where it is NaN."""
    return F.when(~F.isnan(x), x)
