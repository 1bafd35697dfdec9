"""The values of vocabularies, counted by Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.features.types import ValueType
from headrace.features.vocabulary.codes import VocabularyRule


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
    entries = [_entries(c, names.index(c.vocabulary)) for c in columns]
    scalars = [entry for entry, c in zip(entries, columns, strict=True) if not c.type.is_list]
    lists = [entry for entry, c in zip(entries, columns, strict=True) if c.type.is_list]
    together = [F.array(*scalars)] if scalars else []
    entry = F.explode(F.concat(*together, *lists) if len(together) + len(lists) > 1 else (together + lists)[0])
    counted = (
        rows.select(entry.alias("entry"), (day if day is not None else F.lit(0)).alias("day"))
        .where(F.col("entry.value").isNotNull())
        .groupBy("entry.v", "entry.value")
        .agg(F.count(F.lit(1)).alias("count"), F.min("day").alias("day"))
    )
    name = F.element_at(F.array(*[F.lit(n) for n in names]), F.col("v") + 1)
    least = F.element_at(F.array(*[F.lit(rules[n].min_count) for n in names]), F.col("v") + 1)
    return counted.where(F.col("count") >= least).select(name.alias("name"), "value", "count", "day")


def _entries(c: ValueColumn, index: int) -> Column:
    """A struct (vocabulary's index, value as text), or an array of them for a list."""

    def entry(x: Column) -> Column:
        return F.struct(F.lit(index).alias("v"), x.cast("string").alias("value"))

    return F.transform(c.column, entry) if c.type.is_list else entry(c.column)
