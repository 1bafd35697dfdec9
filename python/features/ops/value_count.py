"""value_count: how often a value was there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.features.functions.keys import check_keys
from headrace.features.functions.log1p import log1p
from headrace.features.learn.statistics import Partials, Statistic, counts
from headrace.features.ops.base import ArrowOpContext, FittedState, SparkOpContext
from headrace.features.ops.estimator import EstimatorOp
from headrace.features.types import ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column


class ValueCount(EstimatorOp):
    """Text, integers and booleans to `<column>_count`: how many rows of the training range have the value. bigint.

    With `log`, log(1 + count), double. 0 for a value that the training range lacks, null for null. A row of the
    training range counts itself. (Count encoding; NVTabular has it as JoinGroupby's count, and a ValueCount of lists'
    lengths.)
    """

    name: ClassVar[str] = "value_count"
    by_value: ClassVar[bool] = True
    by_key: ClassVar[bool] = True

    #: log(1 + count) in place of the count.
    log: bool = False

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        check_keys(inputs)
        return {f"{name}_count": ValueType("double" if self.log else "bigint") for name in inputs}

    def sources(self, inputs: Mapping[str, ValueType]) -> dict[str, tuple[str, ...]]:
        return {f"{name}_count": (name,) for name in inputs}

    def statistics(self, types: Mapping[str, ValueType]) -> dict[str, Statistic]:
        return {name: Statistic(key=(name,)) for name in types}

    def finish(self, partials: Partials, types: Mapping[str, ValueType]) -> FittedState:
        tables = {}
        for name in types:
            rows = counts(partials[name])
            values = log1p(rows.astype(np.float64)) if self.log else rows
            tables[name] = pa.table({"key": partials[name].column("key"), "count": values})
        return FittedState({}, tables)

    def spark(self, columns: Mapping[str, Column], context: SparkOpContext) -> dict[str, Column]:
        from pyspark.sql import functions as F

        out = {}
        for name, x in columns.items():
            found = context.table(name, x.cast("string"))["count"]
            none = F.lit(0).cast("double" if self.log else "bigint")
            out[f"{name}_count"] = F.when(x.isNotNull(), F.coalesce(found, none))
        return out

    def arrow(self, columns: Mapping[str, pa.Array], context: ArrowOpContext) -> dict[str, pa.Array]:
        out = {}
        for name, x in columns.items():
            table = context.table(name)
            found = table.take("count", table.rows(x), 0)
            out[f"{name}_count"] = pc.if_else(x.is_valid(), found, pa.scalar(None, found.type))
        return out
