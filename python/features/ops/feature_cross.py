"""feature_cross: lists and scalars crossed, a code for each combination."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from headrace.features.functions.ids import arrow_ids, check_ids, spark_ids
from headrace.features.ops.base import ArrowOpContext, Op, SparkOpContext
from headrace.features.ops.rename import NewName
from headrace.features.types import OpError, ValueType
from headrace.udfs import arrow as native
from headrace.udfs.library import MOST_COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import Column


class FeatureCross(Op):
    """A code 1..`buckets` for each combination of one element of each column: a list, to be ended by pad.

    Two to eight columns of text, integers, booleans or codes, one of them a list (hashed_cross crosses scalars), one
    list of codes out, named `a_X_b_X_..` or `to`: the first `most` combinations, the last column's element changing
    fastest. None where a scalar is null or a list empty; null elements are left out. Text is hashed to an id first; the
    code is 1 + xxhash64(a, b, ...) mod `buckets` of the ids.
    """

    name: ClassVar[str] = "feature_cross"

    buckets: int = Field(ge=1, le=2**31 - 2)
    most: int = Field(default=64, ge=1, le=4096)
    #: The name of the column that comes out.
    to: NewName | None = None

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        if not 2 <= len(inputs) <= MOST_COLUMNS:
            raise OpError(f"crosses 2 to {MOST_COLUMNS} columns, not {len(inputs)}")
        for name, value in inputs.items():
            check_ids(name, value)
        if not any(value.is_list for value in inputs.values()):
            raise OpError("none of the columns is a list; hashed_cross crosses scalars")
        made = ValueType("code", is_list=True, cardinality=self.buckets + 1, most=self.most)
        return {self._named(inputs): made}

    def sources(self, inputs: Mapping[str, ValueType]) -> dict[str, tuple[str, ...]]:
        return {self._named(inputs): tuple(inputs)}

    def reads(self, needed: int | None) -> int | None:
        # Null elements are left out, so later ones may come first.
        return None

    def spark(self, columns: Mapping[str, Column], context: SparkOpContext) -> dict[str, Column]:
        from pyspark.sql import functions as F

        from headrace.udfs import spark as native_spark

        ids = [spark_ids(x, context.types[name]) for name, x in columns.items()]
        codes = native_spark.cross(ids, self.buckets, self.most)
        return {self._named(context.types): F.coalesce(codes, F.array().cast("array<int>"))}

    def arrow(self, columns: Mapping[str, pa.Array], context: ArrowOpContext) -> dict[str, pa.Array]:
        ids = [arrow_ids(x, context.types[name]) for name, x in columns.items()]
        codes = native.cross(ids, self.buckets, self.most)
        return {self._named(context.types): pc.fill_null(codes, []) if codes.null_count else codes}

    def _named(self, inputs: Mapping[str, ValueType]) -> str:
        return self.to or "_X_".join(inputs)
