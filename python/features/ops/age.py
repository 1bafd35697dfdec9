"""age: how long ago something was when the event happened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import pyarrow as pa

from headrace.features.functions.arrays import from_numpy
from headrace.features.functions.timestamps import DAY_MICROS, HOUR_MICROS, SECOND_MICROS, arrow_micros, spark_micros
from headrace.features.ops.base import ArrowOpContext, Op, SparkOpContext
from headrace.features.types import OpError, ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column

UNITS = {"seconds": SECOND_MICROS, "minutes": 60 * SECOND_MICROS, "hours": HOUR_MICROS, "days": DAY_MICROS}


class Age(Op):
    """The time from each other column of the chain to `event`, in `unit`: double `<c>_age`; missing where one is.

    Timestamps and dates (their midnight) in, UTC. Negative where the column is after the event: then the row knows what
    was not known yet, and `clip: {min: 0}` hides that; look at such data first. The difference is taken in whole
    microseconds (years 1698 to 2242) and divided once. NVTabular leaves it to LambdaOp.
    """

    name: ClassVar[str] = "age"

    #: The column of the chain that says when the event happened; no feature of its own comes out.
    event: str
    unit: Literal["seconds", "minutes", "hours", "days"] = "days"

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        if self.event not in inputs:
            raise OpError(f"`event` is '{self.event}', which is no column here (there are: {', '.join(inputs)})")
        if len(inputs) < 2:
            raise OpError(f"needs a column besides the event's, '{self.event}'")
        for name, value in inputs.items():
            if value.is_list or value.element not in ("timestamp", "date"):
                raise OpError(f"column '{name}': takes timestamps and dates, not {value}")
        return {f"{name}_age": ValueType("double") for name in inputs if name != self.event}

    def sources(self, inputs: Mapping[str, ValueType]) -> dict[str, tuple[str, ...]]:
        return {f"{name}_age": (name, self.event) for name in inputs if name != self.event}

    def spark(self, columns: Mapping[str, Column], context: SparkOpContext) -> dict[str, Column]:
        from pyspark.sql import functions as F

        at = {name: spark_micros(x, context.types[name]) for name, x in columns.items()}
        unit = F.lit(float(UNITS[self.unit]))
        return {f"{n}_age": (at[self.event] - x).cast("double") / unit for n, x in at.items() if n != self.event}

    def arrow(self, columns: Mapping[str, pa.Array], context: ArrowOpContext) -> dict[str, pa.Array]:
        at = {name: arrow_micros(x) for name, x in columns.items()}
        valid = {name: x.is_valid().to_numpy(zero_copy_only=False) for name, x in columns.items()}
        out = {}
        for name in at:
            if name != self.event:
                age = (at[self.event] - at[name]).astype(np.float64) / float(UNITS[self.unit])
                out[f"{name}_age"] = from_numpy(np.where(valid[self.event] & valid[name], age, np.nan))
        return out
