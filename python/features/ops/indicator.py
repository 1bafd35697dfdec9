"""What operators that fill have in common: a column that says where there was nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.features.ops.base import ArrowOpContext, Elementwise, SparkOpContext
from headrace.features.types import OpError, ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column


class WithIndicator(Elementwise):
    """With `indicator`, each column (no list: an empty one says it itself) also gives `<c>_missing`: true where the
    value was missing. The chain's later operators leave it as it is, so `normalize` does not touch it.
    """

    indicator: bool = False

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        out = super().types(inputs)
        if self.indicator:
            for name, value in inputs.items():
                if value.is_list:
                    raise OpError(f"column '{name}': `indicator` is for single values, not {value}")
                if f"{name}_missing" in out:
                    raise OpError(f"column '{name}': its indicator has the name of the column '{name}_missing'")
                out[f"{name}_missing"] = ValueType("boolean", final=True)
        return out

    def sources(self, inputs: Mapping[str, ValueType]) -> dict[str, tuple[str, ...]]:
        out: dict[str, tuple[str, ...]] = {name: (name,) for name in inputs}
        if self.indicator:
            out |= {f"{name}_missing": (name,) for name in inputs}
        return out

    def spark(self, columns: Mapping[str, Column], context: SparkOpContext) -> dict[str, Column]:
        out = super().spark(columns, context)
        return out | ({f"{name}_missing": x.isNull() for name, x in columns.items()} if self.indicator else {})

    def arrow(self, columns: Mapping[str, pa.Array], context: ArrowOpContext) -> dict[str, pa.Array]:
        out = super().arrow(columns, context)
        return out | ({f"{name}_missing": x.is_null() for name, x in columns.items()} if self.indicator else {})
