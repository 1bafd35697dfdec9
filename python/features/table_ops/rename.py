"""rename: other names for columns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa
from pydantic import Field

from headrace.features.table_ops.base import SparkTableContext, TableOp, TableSchema, refuse, reserved
from headrace.features.types import ValueType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Rename(TableOp):
    """Gives columns other names: `rename: {to: {old: new}}`. Two may swap theirs.

    The label and the event's time keep theirs: other parts of the spec name them. Source: NVTabular's Rename.
    """

    name: ClassVar[str] = "rename"
    rowwise: ClassVar[bool] = True

    to: Mapping[str, str] = Field(min_length=1)

    def columns(self, schema: TableSchema) -> dict[str, ValueType]:
        for old, new in self.to.items():
            schema.type_of(old)
            refuse(old == schema.label, f"'{old}' is the label; features.label names it")
            refuse(old == schema.time, f"'{old}' is the event's time; table.event_time names it")
            refuse(reserved(new), f"'{new}' is a reserved name (`ds`, names that begin with `_`)")
        out: dict[str, ValueType] = {}
        there: set[str] = set()
        for name, type_ in schema.types.items():
            new = self.to.get(name, name)
            # Spark's names have no case.
            refuse(new.lower() in there, f"two columns would be named '{new}'")
            there.add(new.lower())
            out[new] = type_
        return out

    def reads(self, wanted: Collection[str], schema: TableSchema) -> set[str]:
        return {c for c in schema.types if self.to.get(c, c) in wanted}

    def arrow_rows(self, schema: TableSchema) -> Callable[[pa.Table], pa.Table]:
        return lambda rows: rows.rename_columns([self.to.get(c, c) for c in rows.schema.names])

    def spark(self, frame: DataFrame, context: SparkTableContext) -> DataFrame:
        from headrace.features.functions.spark_expressions import col
        from headrace.features.table_ops.spark_windows import without_helpers

        frame = without_helpers(frame)
        return frame.select(*[col(c).alias(self.to.get(c, c)) for c in frame.columns])
