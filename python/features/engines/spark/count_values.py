"""The values of vocabularies, counted by Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.features.types import ValueType
from headrace.features.vocabulary.rule import VocabularyRule


@dataclass(frozen=True)
class ValueColumn:
    """A column whose values belong into a vocabulary."""

    vocabulary: str
    column: Column
    type: ValueType


def count_values(
    rows: DataFrame, columns: Sequence[ValueColumn], rules: Mapping[str, VocabularyRule], day: Column | None
) -> DataFrame:
    """How often each value is there and when first, for all vocabularies in one pass.

    Returns:
        (name string, value string, count bigint, day): values seen `min_count` times or more.
    """
    names = list(dict.fromkeys(c.vocabulary for c in columns))
    cells = [_cells(c, names.index(c.vocabulary)) for c in columns]
    scalars = [cell for cell, c in zip(cells, columns, strict=True) if not c.type.is_list]
    lists = [cell for cell, c in zip(cells, columns, strict=True) if c.type.is_list]
    together = [F.array(*scalars)] if scalars else []
    cell = F.explode(F.concat(*together, *lists) if len(together) + len(lists) > 1 else (together + lists)[0])
    counted = (
        rows.select(cell.alias("cell"), (day if day is not None else F.lit(0)).alias("day"))
        .where(F.col("cell.value").isNotNull())
        .groupBy("cell.v", "cell.value")
        .agg(F.count(F.lit(1)).alias("count"), F.min("day").alias("day"))
    )
    name = F.element_at(F.array(*[F.lit(n) for n in names]), F.col("v") + 1)
    least = F.element_at(F.array(*[F.lit(rules[n].min_count) for n in names]), F.col("v") + 1)
    return counted.where(F.col("count") >= least).select(name.alias("name"), "value", "count", "day")


def _cells(c: ValueColumn, index: int) -> Column:
    """A struct (vocabulary's index, value as text), or an array of them for a list."""

    def cell(x: Column) -> Column:
        return F.struct(F.lit(index).alias("v"), x.cast("string").alias("value"))

    return F.transform(c.column, cell) if c.type.is_list else cell(c.column)
