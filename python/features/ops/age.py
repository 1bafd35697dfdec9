"""age: how long ago something was when the event happened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headrace.features.columns import ValueType
from headrace.features.op import ArrowPlace, Op, OpError, SparkPlace, from_numpy

if TYPE_CHECKING:
    from pyspark.sql import Column

_MICROSECONDS = {"seconds": 10**6, "minutes": 60 * 10**6, "hours": 3600 * 10**6, "days": 86_400 * 10**6}


class Age(Op):
    """The time from each other column of the chain to `event`, in `unit`: double `<c>_age`; missing where one is.

    Timestamps and dates (their midnight) in, UTC. Negative where the column is after the event: then the row knows what
    was not known yet, and `clip: {min: 0}` hides that; look at such data first. The difference is taken in whole
    microseconds and divided once. NVTabular leaves it to LambdaOp.
    """

    name: ClassVar[str] = "age"

    #: The column of the chain that says when the event happened; no feature of its own comes out.
    event: str
    unit: Literal["seconds", "minutes", "hours", "days"] = "days"

    def types(self, given: Mapping[str, ValueType]) -> dict[str, ValueType]:
        if self.event not in given:
            raise OpError(f"`event` is '{self.event}', which is no column here (there are: {', '.join(given)})")
        if len(given) < 2:
            raise OpError(f"needs a column besides the event's, '{self.event}'")
        for name, value in given.items():
            if value.is_list or value.element not in ("timestamp", "date"):
                raise OpError(f"column '{name}': takes timestamps and dates, not {value}")
        return {f"{name}_age": ValueType("double") for name in given if name != self.event}

    def sources(self, given: Mapping[str, ValueType]) -> dict[str, tuple[str, ...]]:
        return {f"{name}_age": (name, self.event) for name in given if name != self.event}

    def spark(self, columns: Mapping[str, Column], place: SparkPlace) -> dict[str, Column]:
        from pyspark.sql import functions as F

        at = {name: _spark_microseconds(x, place.types[name]) for name, x in columns.items()}
        unit = F.lit(float(_MICROSECONDS[self.unit]))
        return {f"{n}_age": (at[self.event] - x).cast("double") / unit for n, x in at.items() if n != self.event}

    def arrow(self, columns: Mapping[str, pa.Array], place: ArrowPlace) -> dict[str, pa.Array]:
        at = {name: _arrow_microseconds(x) for name, x in columns.items()}
        valid = {name: x.is_valid().to_numpy(zero_copy_only=False) for name, x in columns.items()}
        out = {}
        for name in at:
            if name != self.event:
                age = (at[self.event] - at[name]).astype(np.float64) / float(_MICROSECONDS[self.unit])
                out[f"{name}_age"] = from_numpy(np.where(valid[self.event] & valid[name], age, np.nan))
        return out


def _spark_microseconds(x: Column, given: ValueType) -> Column:
    from pyspark.sql import functions as F

    if given.element == "date":
        return F.datediff(x, F.lit("1970-01-01").cast("date")).cast("bigint") * F.lit(86_400 * 10**6).cast("bigint")
    return F.unix_micros(x)


def _arrow_microseconds(x: pa.Array) -> NDArray[np.int64]:
    """Microseconds since 1970, 0 for null. int64 [n]."""
    if pa.types.is_date(x.type):
        days: NDArray[np.int32] = pc.fill_null(x.cast(pa.int32()), 0).to_numpy(zero_copy_only=False)
        return days.astype(np.int64) * np.int64(86_400 * 10**6)
    return np.asarray(pc.fill_null(x.cast(pa.int64()), 0).to_numpy(zero_copy_only=False), np.int64)
