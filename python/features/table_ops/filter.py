"""filter: only the rows for which a condition is true."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from headrace.features.functions.arrays import one_chunk
from headrace.features.table_ops.base import QUERY, SparkTableContext, TableOp, TableSchema, kept
from headrace.features.table_ops.predicate import Predicate
from headrace.features.types import ValueType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Filter(TableOp):
    """Keeps the rows for which `where` is true, not those for which it is false or unknown (a null in it).

    For the conditions see headrace.features.table_ops.predicate. Query rows always stay. Source: NVTabular's Filter.
    """

    name: ClassVar[str] = "filter"
    rowwise: ClassVar[bool] = True

    where: str

    def columns(self, schema: TableSchema) -> dict[str, ValueType]:
        Predicate(self.where, schema.types)
        return dict(schema.types)

    def reads(self, wanted: Collection[str], schema: TableSchema) -> set[str]:
        return {*wanted, *Predicate(self.where, schema.types).columns}

    def arrow_rows(self, schema: TableSchema) -> Callable[[pa.Table], pa.Table] | None:
        condition = Predicate(self.where, schema.types)
        if any(schema.types[c].element == "decimal" for c in condition.columns):
            return None  # Arrow rounds decimals to doubles otherwise than Spark
        return lambda rows: kept(rows, condition.arrow(lambda name: one_chunk(rows.column(name))))

    def spark(self, frame: DataFrame, context: SparkTableContext) -> DataFrame:
        from pyspark.sql import functions as F

        return frame.where(F.col(QUERY).isNotNull() | Predicate(self.where, context.schema.types).spark())
