"""The Spark side of a fitted workflow: one select of expressions over left joins with the vocabularies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.features.columns import ValueType
from headrace.schema import Kind

if TYPE_CHECKING:
    from headrace.features.workflow import FittedWorkflow

#: Spark fuses all broadcast joins of a select into one generated method, and the JIT leaves methods above 8,000
#: bytecodes interpreted: 26 joins ran at a quarter of the speed. A `coalesce` to more partitions than there are moves
#: no row and runs on GPUs too, but generated code ends at it.
_JOINS_A_METHOD = 4
_MORE_THAN_ANY = 1 << 20


def col(name: str) -> Column:
    """A column by its exact name, dots and all."""
    return F.col(f"`{name.replace('`', '``')}`")


def enter(name: str, given: ValueType) -> Column:
    """An input column as operators see it: NaN is null, a null list is empty."""
    x = col(name)
    real = given.element in ("float", "double")
    if given.is_list:
        x = F.coalesce(x, F.array().cast(f"array<{given.element}>"))
        return F.transform(x, _nan_to_null) if real else x
    return _nan_to_null(x) if real else x


def is_missing(name: str, given: ValueType) -> Column:
    """Boolean: no value (null, NaN, an empty list)."""
    x = enter(name, given)
    return F.size(x) == 0 if given.is_list else x.isNull()


def transform_frame(
    fitted: FittedWorkflow, frame: DataFrame, keep: Mapping[str, str], folder: Path | None, broadcast_rows: int
) -> DataFrame:
    """See `FittedWorkflow.transform`."""
    joins: list[tuple[str, Column]] = []

    def lookup(vocabulary: str, key: Column) -> Column:
        joins.append((vocabulary, key))
        return F.col(f"__code{len(joins) - 1}")

    ends: dict[str, Column] = {}
    for chain, states in zip(fitted.workflow.chains, fitted.states, strict=True):
        columns = {name: enter(name, fitted.workflow.input_type(name)) for name in chain.columns}
        for step, state in zip(chain.steps, states, strict=True):
            columns = step.spark(columns, state, lookup)
        ends |= columns

    selected = []
    for feature in fitted.features:
        x = ends[feature.name]
        for i, column in enumerate(feature.physical):
            value = F.get(x, F.lit(i)) if feature.is_list else x
            selected.append((value.cast("int") if feature.kind is Kind.CATEGORICAL else _finite(value)).alias(column))
    selected += [col(source).alias(name) for name, source in keep.items()]

    if joins:
        frame = frame.select("*", *[key.alias(f"__key{i}") for i, (_, key) in enumerate(joins)])
        tables = {name: _vocabulary(fitted, frame, name, folder) for name in {name for name, _ in joins}}
        for i, (name, _) in enumerate(joins):
            side = tables[name].select(F.col("value").alias(f"__key{i}"), F.col("code").cast("int").alias(f"__code{i}"))
            if len(fitted.vocabularies[name]) <= broadcast_rows:
                side = F.broadcast(side)
            frame = frame.join(side, f"__key{i}", "left")
            if (i + 1) % _JOINS_A_METHOD == 0 and i + 1 < len(joins):
                frame = frame.coalesce(_MORE_THAN_ANY)
    return frame.select(*selected)


def _vocabulary(fitted: FittedWorkflow, frame: DataFrame, name: str, folder: Path | None) -> DataFrame:
    """A vocabulary as a frame (value string, code bigint): of its saved file where there is one (GPUs can scan it)."""
    from headrace.features.workflow import vocabulary_file

    spark = frame.sparkSession
    if folder is not None:
        return spark.read.schema("value string, code bigint").parquet(str(vocabulary_file(folder, name)))
    return spark.createDataFrame(fitted.vocabularies[name].table, "value string, code bigint")


def _nan_to_null(x: Column) -> Column:
    return F.when(~F.isnan(x), x)


def _finite(x: Column) -> Column:
    """A number as float32; what is missing or not finite as float32 is 0."""
    single = x.cast("float")
    infinity = F.lit(float("inf")).cast("float")
    # NaN is above infinity in Spark's order, so it falls out too.
    return F.when((single < infinity) & (single > -infinity), single).otherwise(F.lit(0.0).cast("float"))
