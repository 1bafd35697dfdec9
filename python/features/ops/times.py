"""Operators over times: age since another event, cyclic positions in the day, week and year."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, localcontext
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from headrace.compute import pc
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
    onnx: ClassVar[str] = "headrace.export.features.operators:age"

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

        micros = {name: spark_micros(x, context.types[name]) for name, x in columns.items()}
        unit = F.lit(float(UNITS[self.unit]))
        return {
            f"{n}_age": (micros[self.event] - x).cast("double") / unit for n, x in micros.items() if n != self.event
        }

    def arrow(self, columns: Mapping[str, pa.Array], context: ArrowOpContext) -> dict[str, pa.Array]:
        micros = {name: arrow_micros(x) for name, x in columns.items()}
        valid = {name: x.is_valid().to_numpy(zero_copy_only=False) for name, x in columns.items()}
        out = {}
        for name in micros:
            if name != self.event:
                age = (micros[self.event] - micros[name]).astype(np.float64) / float(UNITS[self.unit])
                out[f"{name}_age"] = from_numpy(np.where(valid[self.event] & valid[name], age, np.nan))
        return out


Part = Literal["hour", "weekday", "day", "month"]
#: Positions on each circle. A day of the year is one of 366, so that 29 February has a place.
PERIODS: dict[Part, int] = {"hour": 24, "weekday": 7, "day": 366, "month": 12}
#: 2 pi.
_TWO_PI = Decimal("6.2831853071795864769252867665590057683943387987502")
#: Terms of a series below this change nothing; a sum below that is 0 (sin of half a turn).
_TINY, _ZERO = Decimal("1e-42"), Decimal("1e-30")


class Cyclic(Op):
    """sin and cos of 2 pi position / period, two doubles a circle; both are missing where the column is.

    Of a timestamp or a date (UTC), `of` one or several of hour (0-23), weekday (Monday 0), day (of the year, from 0)
    and month (from 0): columns `<c>_<part>_sin`, `<c>_<part>_cos`. Of an integer, with a `period`: its position is what
    is left of it after division by the period, never negative (-1 is period - 1); columns `<c>_sin`, `<c>_cos`.

    Positions are whole, so both engines take sin and cos from one table of constants and agree to the bit. The encoding
    is that of directional statistics (Mardia and Jupp, "Directional Statistics", 2000, chapter 2); NVTabular leaves it
    to LambdaOp.
    """

    name: ClassVar[str] = "cyclic"
    onnx: ClassVar[str] = "headrace.export.features.operators:cyclic"
    by_value: ClassVar[bool] = True

    of: tuple[Part, ...] = ()
    period: int | None = Field(default=None, ge=2, le=10_000)

    @field_validator("of", mode="before", json_schema_input_type=Part | tuple[Part, ...])
    @classmethod
    def _one_part(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_way(self) -> Cyclic:
        if bool(self.of) == (self.period is not None):
            raise ValueError("give `of` for times and dates, or `period` for integers")
        if len(set(self.of)) < len(self.of):
            raise ValueError("`of` names a part twice")
        return self

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        for name, value in inputs.items():
            if self.period is not None:
                if value.is_list or not value.is_integer:
                    raise OpError(f"column '{name}': `period` is for integers, not {value}")
            elif value.is_list or value.element not in ("timestamp", "date"):
                raise OpError(f"column '{name}': `of` is for timestamps and dates, not {value}")
            elif value.element == "date" and "hour" in self.of:
                raise OpError(f"column '{name}': a date has no hour")
        return {out: ValueType("double") for name in inputs for out, _ in self.outputs_of(name)}

    def sources(self, inputs: Mapping[str, ValueType]) -> dict[str, tuple[str, ...]]:
        return {out: (name,) for name in inputs for out, _ in self.outputs_of(name)}

    def outputs_of(self, name: str) -> list[tuple[str, Part | None]]:
        """Return names of what comes out of a column, sin before cos, with the part that each is of."""
        parts: list[Part | None] = [*self.of] if self.period is None else [None]
        return [(f"{name}{f'_{p}' if p else ''}_{f}", p) for p in parts for f in ("sin", "cos")]

    def spark(self, columns: Mapping[str, Column], context: SparkOpContext) -> dict[str, Column]:
        from pyspark.sql import functions as F

        out = {}
        for name, x in columns.items():
            for output, part in self.outputs_of(name):
                sines, cosines = circle(self.period or PERIODS[part or "hour"])
                table = F.array(*[F.lit(float(v)) for v in (sines if output.endswith("_sin") else cosines)])
                out[output] = F.get(table, self._spark_position(x, part))
        return out

    def _spark_position(self, x: Column, part: Part | None) -> Column:
        from pyspark.sql import functions as F

        if part is None:
            return F.pmod(x.cast("bigint"), F.lit(self.period).cast("bigint")).cast("int")
        if part == "hour":
            return F.hour(x)
        if part == "weekday":
            return F.weekday(x)
        return (F.dayofyear(x) if part == "day" else F.month(x)) - F.lit(1)

    def arrow(self, columns: Mapping[str, pa.Array], context: ArrowOpContext) -> dict[str, pa.Array]:
        out = {}
        for name, x in columns.items():
            valid = x.is_valid().to_numpy(zero_copy_only=False)
            positions = {part: self._arrow_position(x, part) for _, part in self.outputs_of(name)}
            for output, part in self.outputs_of(name):
                sines, cosines = circle(self.period or PERIODS[part or "hour"])
                values = (sines if output.endswith("_sin") else cosines)[positions[part]]
                out[output] = from_numpy(np.where(valid, values, np.nan))
        return out

    def _arrow_position(self, x: pa.Array, part: Part | None) -> NDArray[np.int64]:
        """Return positions, 0 for null."""
        if part is None:
            assert self.period is not None
            numbers: NDArray[np.int64] = pc.fill_null(x.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
            return numbers % np.int64(self.period)
        parts = {"hour": pc.hour, "weekday": pc.day_of_week, "day": pc.day_of_year, "month": pc.month}[part](x)
        numbers = pc.fill_null(parts.cast(pa.int64()), 1).to_numpy(zero_copy_only=False)
        return numbers - np.int64(part in ("day", "month"))


@lru_cache(maxsize=64)
def circle(period: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """sin and cos of 2 pi i / period for i in 0 .. period - 1: float64 [period] each.

    By their series in 40 digits, rounded once: the same bits on every machine, which a mathematical library's are not.
    """
    sines, cosines = np.empty(period), np.empty(period)
    with localcontext() as context:
        context.prec = 40
        for i in range(period):
            # Within half a turn of 0, where the series takes some 40 terms.
            angle = _TWO_PI * (i if 2 * i <= period else i - period) / period
            sine, cosine, term, n = Decimal(0), Decimal(1), Decimal(1), 0
            while abs(term) > _TINY:
                n += 1
                term = term * angle / n
                if n % 2:
                    sine += term if n % 4 == 1 else -term
                else:
                    cosine += term if n % 4 == 0 else -term
            sines[i], cosines[i] = (0.0 if abs(v) < _ZERO else float(v) for v in (sine, cosine))
    return sines, cosines
