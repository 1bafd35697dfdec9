"""dropna: no rows with missing values."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import reduce
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from headrace.features.functions.arrays import input_values, is_missing, one_chunk
from headrace.features.table_ops.base import QUERY, SparkTableContext, TableOp, TableSchema, kept
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

    def reads(self, wanted: Collection[str], schema: TableSchema) -> set[str]:
        return {*wanted, *self.subset}

    def arrow_rows(self, schema: TableSchema) -> Callable[[pa.Table], pa.Table]:
        def drop(rows: pa.Table) -> pa.Table:
            missing = [is_missing(input_values(one_chunk(rows.column(c)))) for c in self.subset]
            return kept(rows, pa.array(~(np.logical_or if self.how == "any" else np.logical_and).reduce(missing)))

        return drop

    def spark(self, frame: DataFrame, context: SparkTableContext) -> DataFrame:
        from pyspark.sql import functions as F

        from headrace.features.functions import spark_expressions

        missing = [spark_expressions.is_missing(c, context.schema.types[c]) for c in self.subset]
        drop = reduce(lambda a, b: a | b if self.how == "any" else a & b, missing)
        return frame.where(F.col(QUERY).isNotNull() | ~drop)
