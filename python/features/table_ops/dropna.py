"""dropna: no rows with missing values."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from headrace.features.table_ops.base import QUERY, SparkTableContext, TableOp, TableSchema
from headrace.features.types import ValueType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Dropna(TableOp):
    """Drops rows in which any (or all) of the columns are missing: null, NaN or an empty list. Query rows always stay.

    Source: NVTabular's Dropna.
    """

    name: ClassVar[str] = "dropna"
    rowwise: ClassVar[bool] = True

    subset: tuple[str, ...] = Field(min_length=1)
    how: Literal["any", "all"] = "any"

    def columns(self, schema: TableSchema) -> dict[str, ValueType]:
        for column in self.subset:
            schema.type_of(column)
        return dict(schema.types)

    def spark(self, frame: DataFrame, context: SparkTableContext) -> DataFrame:
        from pyspark.sql import functions as F

        from headrace.features.functions.spark_expressions import is_missing

        missing = [is_missing(c, context.schema.types[c]) for c in self.subset]
        drop = reduce(lambda a, b: a | b if self.how == "any" else a & b, missing)
        return frame.where(F.col(QUERY).isNotNull() | ~drop)
