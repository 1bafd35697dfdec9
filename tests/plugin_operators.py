"""Operators as a user would write them, in a module of their own: named `tests.plugin_operators:Class`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from headrace.features.functions.arrays import doubles
from headrace.features.ops.base import ArrowOpContext, Elementwise, Op, SparkOpContext, State, number
from headrace.features.table_ops.base import SparkTableContext, TableOp, TableSchema
from headrace.features.types import ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


class Halve(Elementwise):
    """Half of a number, or another part of it."""

    name: ClassVar[str] = "halve"
    by: float = 2.0

    def type_of(self, input_type: ValueType) -> ValueType:
        return number(input_type, "double")

    def spark_value(self, x: Column, input_type: ValueType, state: State) -> Column:
        return x.cast("double") / self.by

    def arrow_value(self, x: pa.Array, input_type: ValueType, state: State) -> pa.Array:
        return pc.divide(doubles(x), self.by)


class HalveOtherwise(Halve):
    """Its bodies differ where x is negative."""

    name: ClassVar[str] = "halve_otherwise"

    def arrow_value(self, x: pa.Array, input_type: ValueType, state: State) -> pa.Array:
        return pc.abs(super().arrow_value(x, input_type, state))


class LessTheMean(Op):
    """Less the mean of the rows that are transformed together: not row by row."""

    name: ClassVar[str] = "less_the_mean"

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        return dict.fromkeys(inputs, ValueType("double"))

    def spark(self, columns: Mapping[str, Column], context: SparkOpContext) -> dict[str, Column]:
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        return {n: x - F.avg(x).over(Window.partitionBy(F.lit(1))) for n, x in columns.items()}

    def arrow(self, columns: Mapping[str, pa.Array], context: ArrowOpContext) -> dict[str, pa.Array]:
        return {n: pc.subtract(x, pc.mean(x)) for n, x in columns.items()}


class Rank(TableOp):
    """A row's place among those of its key in time; `backwards`: counted from the last, which looks at the future."""

    name: ClassVar[str] = "rank"
    key: str
    backwards: bool = False

    def columns(self, schema: TableSchema) -> dict[str, ValueType]:
        schema.key(self.key)
        return schema.adding({"rank": ValueType("bigint")})

    def spark(self, frame: DataFrame, context: SparkTableContext) -> DataFrame:
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        time: Any = F.col(context.schema.needs_time())
        order = Window.partitionBy(self.key).orderBy(time.desc() if self.backwards else time.asc())
        return frame.withColumn("rank", F.rank().over(order).cast("bigint"))
