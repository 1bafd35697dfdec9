"""Operators over numbers: clip, log, normalize, normalize_minmax, reduce_dtype, and decimals as numbers or texts.

And those that fill missing values: fill_missing with a constant, fill_median with the training range's median.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import StrictBool, StrictFloat, StrictInt, StrictStr, field_validator, model_validator

from headrace.compute import pc
from headrace.features.functions.arrays import doubles, from_numpy, to_numpy
from headrace.features.learn import exact_sums
from headrace.features.learn.statistics import Number, Partials, Statistic, counts, cumulated, median, numbers
from headrace.features.ops.base import (
    ArrowOpContext,
    Elementwise,
    EstimatorOp,
    FittedState,
    QuantileOp,
    SparkOpContext,
    State,
    number,
    scalars,
)
from headrace.features.types import Element, OpError, ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column


class Clip(Elementwise):
    """Numbers below `min` become `min`, those above `max` become `max`, infinities too. Null stays null.

    Integers stay integers where both given bounds are integers; other numbers become double.
    """

    name: ClassVar[str] = "clip"
    onnx: ClassVar[str] = "headrace.export.features.operators:clip"

    min: StrictInt | StrictFloat | None = None
    max: StrictInt | StrictFloat | None = None

    @model_validator(mode="after")
    def _bounds(self) -> Clip:
        if self.min is None and self.max is None:
            raise ValueError("give min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min ({self.min}) is above max ({self.max})")
        if any(b != b for b in (self.min, self.max)):
            raise ValueError("a bound is not a number (NaN)")
        return self

    def type_of(self, input_type: ValueType) -> ValueType:
        has_integer_bounds = all(
            b is None or (isinstance(b, int) and -(2**63) <= b < 2**63) for b in (self.min, self.max)
        )
        return number(input_type, "bigint" if input_type.is_integer and has_integer_bounds else "double")

    def spark_value(self, x: Column, input_type: ValueType, state: State) -> Column:
        from pyspark.sql import functions as F

        element = self.type_of(input_type).element
        as_ = float if element == "double" else int
        x = x.cast(element)
        if self.min is not None:
            low = F.lit(as_(self.min)).cast(element)
            x = F.when(x < low, low).otherwise(x)
        if self.max is not None:
            high = F.lit(as_(self.max)).cast(element)
            x = F.when(x > high, high).otherwise(x)
        return x

    def arrow_value(self, x: pa.Array, input_type: ValueType, state: State) -> pa.Array:
        out = self.type_of(input_type)
        x = doubles(x) if out.element == "double" else x.cast(out.arrow)
        as_ = float if out.element == "double" else int
        if self.min is not None:
            low = pa.scalar(as_(self.min), out.arrow)
            x = pc.if_else(pc.less(x, low), low, x)
        if self.max is not None:
            high = pa.scalar(as_(self.max), out.arrow)
            x = pc.if_else(pc.greater(x, high), high, x)
        return x


F64 = npt.NDArray[np.float64]

# Coefficients of fdlibm's s_log1p.c (Sun Microsystems, 1993); Java's StrictMath, hence Spark's log1p, is that code.
_LN2_HI = 6.93147180369123816490e-01
_LN2_LO = 1.90821492927058770002e-10
_LP = (
    6.666666666666735130e-01,
    3.999999999940941908e-01,
    2.857142874366239149e-01,
    2.222219843214978396e-01,
    1.818357216161805012e-01,
    1.531383769920937332e-01,
    1.479819860511658591e-01,
)


def log1p(x: F64) -> F64:
    """log(1 + x), bit for bit StrictMath.log1p of Java. float64 [n] -> float64 [n]; NaN where x <= -1 or x is NaN."""
    with np.errstate(all="ignore"):
        high = (x.view(np.int64) >> 32).astype(np.int32)
        reduced = (high >= 0x3FDA827A) | (
            (high < 0) & (high > 0xBFD2BEC3 - 2**32)
        )  # else k = 0, f = x: -0.29 < x < 0.41
        huge = high >= 0x43400000  # 2**53: 1 + x is x
        u = np.where(huge, x, 1.0 + x)
        bits = u.view(np.int64)
        u_high = bits >> 32
        k = (u_high >> 20) - 1023
        c = np.where(k > 0, 1.0 - (u - x), x - (u - 1.0)) / u
        c = np.where(huge, 0.0, c)
        fraction = u_high & 0x000FFFFF
        lower = fraction < 0x6A09E
        # u scaled into [sqrt(1/2), sqrt(2)): the exponent of 1.0, or of 0.5 and k one more.
        low_word = bits & 0xFFFFFFFF
        exponent = np.where(lower, 0x3FF00000, 0x3FE00000)
        scaled = (((fraction | exponent) << 32) | low_word).view(np.float64)
        k = np.where(lower, k, k + 1)
        hu = np.where(lower, fraction, (0x00100000 - fraction) >> 2)
        k = np.where(reduced, k, 0).astype(np.float64)
        f = np.where(reduced, scaled - 1.0, x)
        hu = np.where(reduced, hu, 1)
        c = np.where(reduced, c, 0.0)

        hfsq = 0.5 * f * f
        s = f / (2.0 + f)
        z = s * s
        r = _LP[6]
        for coefficient in reversed(_LP[:6]):
            r = coefficient + z * r
        r = z * r
        far = k * _LN2_HI - ((hfsq - (s * (hfsq + r) + (k * _LN2_LO + c))) - f)
        near = f - (hfsq - s * (hfsq + r))
        out = np.where(k == 0, near, far)

        # |f| < 2**-20 after scaling.
        tiny = hfsq * (1.0 - 0.66666666666666666 * f)
        flat = np.where(k == 0, f - tiny, k * _LN2_HI - ((tiny - (k * _LN2_LO + c)) - f))
        flat = np.where(f == 0, np.where(k == 0, 0.0, k * _LN2_HI + (c + k * _LN2_LO)), flat)
        out = np.where(hu == 0, flat, out)

        size = high & 0x7FFFFFFF
        out = np.where(size < 0x3E200000, x - x * x * 0.5, out)  # |x| < 2**-29
        out = np.where(size < 0x3C900000, x, out)  # |x| < 2**-54
        out = np.where(x == np.inf, np.inf, out)
        return np.where(x > -1, out, np.nan)


class Log(Elementwise):
    """The natural logarithm of 1 + x, as NVTabular's LogOp. double out.

    Where x <= -1 there is none and the result is missing (NVTabular: NaN, or -inf at -1); clip first if that matters.
    Spark's log1p is fdlibm's, and the Arrow kernel is the same algorithm: equal to the last bit of a double on CPUs.
    On GPUs log1p is the device library's, within one unit in the last place.
    """

    name: ClassVar[str] = "log"
    onnx: ClassVar[str] = "headrace.export.features.operators:log"

    def type_of(self, input_type: ValueType) -> ValueType:
        return number(input_type, "double")

    def spark_value(self, x: Column, input_type: ValueType, state: State) -> Column:
        from pyspark.sql import functions as F

        return F.log1p(x.cast("double"))  # null where x <= -1

    def arrow_value(self, x: pa.Array, input_type: ValueType, state: State) -> pa.Array:
        return from_numpy(log1p(to_numpy(doubles(x))))


class Normalize(Elementwise, EstimatorOp):
    """Numbers to double: (x - mean) / std over the training range; x - mean where std is 0. Null stays null.

    std has n - 1 below, as NVTabular's Normalize. Values that float32 cannot hold are no part of the statistics, nor
    are infinities. Mean and standard deviation come from exact sums (learn.exact_sums), each rounded once, so
    the same rows give the same bits whatever the partitioning, and days merge.
    """

    name: ClassVar[str] = "normalize"
    onnx: ClassVar[str] = "headrace.export.features.operators:normalize"

    def type_of(self, input_type: ValueType) -> ValueType:
        return number(input_type, "double")

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        return super().types(scalars(inputs))

    def statistics(self, types: Mapping[str, ValueType]) -> dict[str, Statistic]:
        return {name: Statistic(numbers=(Number(name, sum=True, squares=True),)) for name in types}

    def finish(self, partials: Partials, types: Mapping[str, ValueType]) -> FittedState:
        states = {}
        for name in types:
            partial = partials[name]
            n = counts(partial, "0.count")
            sums, squares = numbers(partial, 0, "sum"), numbers(partial, 0, "squares")
            mean, std = float(exact_sums.means(sums, n)[0]), float(exact_sums.deviations(sums, squares, n)[0])
            states[name] = {"mean": mean if n[0] else 0.0, "std": std if n[0] else 0.0, "count": int(n[0])}
        return FittedState(states)

    def spark_value(self, x: Column, input_type: ValueType, state: State) -> Column:
        from pyspark.sql import functions as F

        out = x.cast("double") - F.lit(float(state["mean"]))
        return out / F.lit(float(state["std"])) if state["std"] > 0 else out

    def arrow_value(self, x: pa.Array, input_type: ValueType, state: State) -> pa.Array:
        out = pc.subtract(doubles(x), float(state["mean"]))
        return pc.divide(out, float(state["std"])) if state["std"] > 0 else out


class NormalizeMinMax(Elementwise, EstimatorOp):
    """Numbers to double: (x - min) / (max - min) over the training range; x - min where they are equal. Null stays
    null.

    NVTabular's NormalizeMinMax (which gives 0.5 where they are equal). Later days' values may lie outside of 0 to 1;
    put clip behind it where that matters. Values that float32 cannot hold, and infinities, are no part of the range.
    """

    name: ClassVar[str] = "normalize_minmax"
    onnx: ClassVar[str] = "headrace.export.features.operators:normalize_minmax"

    def type_of(self, input_type: ValueType) -> ValueType:
        return number(input_type, "double")

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        return super().types(scalars(inputs))

    def statistics(self, types: Mapping[str, ValueType]) -> dict[str, Statistic]:
        return {name: Statistic(numbers=(Number(name, minmax=True),)) for name in types}

    def finish(self, partials: Partials, types: Mapping[str, ValueType]) -> FittedState:
        states = {}
        for name in types:
            n = int(counts(partials[name], "0.count")[0])
            low, high = (partials[name].column(f"0.{end}")[0].as_py() for end in ("min", "max"))
            states[name] = {"min": low if n else 0.0, "max": high if n else 0.0, "count": n}
        return FittedState(states)

    def spark_value(self, x: Column, input_type: ValueType, state: State) -> Column:
        from pyspark.sql import functions as F

        low, width = float(state["min"]), float(state["max"]) - float(state["min"])
        out = x.cast("double") - F.lit(low)
        return out / F.lit(width) if width > 0 else out

    def arrow_value(self, x: pa.Array, input_type: ValueType, state: State) -> pa.Array:
        low, width = float(state["min"]), float(state["max"]) - float(state["min"])
        out = pc.subtract(doubles(x), low)
        return pc.divide(out, width) if width > 0 else out


_INT32 = (-(2**31), 2**31 - 1)
_FLOAT32 = 3.4028234663852886e38


class ReduceDtype(Elementwise):
    """Numbers in the smallest type of the chain that holds `min`..`max`; what is outside cannot be held and is missing.

    Integers become int where both bounds fit 32 bits, else bigint; other numbers become float (rounded to nearest)
    where both bounds fit it, else double.

    NVTabular's ReduceDtypeSize finds the bounds in the data and goes down to int8; here they are given, so that a day's
    type does not hang on its data. A dataset has float32 and int32 columns only, the smallest physical types of Parquet
    (int8 and int16 are stored in 32 bits), so this does not make it smaller. It halves what operators after it compute
    with and hash, and keeps out values that nobody has announced.
    """

    name: ClassVar[str] = "reduce_dtype"
    onnx: ClassVar[str] = "headrace.export.features.operators:reduce_dtype"

    min: StrictInt | StrictFloat
    max: StrictInt | StrictFloat

    @model_validator(mode="after")
    def _bounds(self) -> ReduceDtype:
        if not (math.isfinite(self.min) and math.isfinite(self.max)):
            raise ValueError("bounds must be finite")
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) is above max ({self.max})")
        return self

    def type_of(self, input_type: ValueType) -> ValueType:
        if input_type.is_integer:
            if not (isinstance(self.min, int) and isinstance(self.max, int)):
                raise OpError(f"is {input_type}, so `min` and `max` must be integers, not {self.min} and {self.max}")
            if not (self.min >= -(2**63) and self.max < 2**63):
                raise OpError(f"{self.min}..{self.max} does not fit 64 bits")
            return ValueType("int" if self.min >= _INT32[0] and self.max <= _INT32[1] else "bigint")
        if input_type.element in ("float", "double"):
            fits = self.min >= -_FLOAT32 and self.max <= _FLOAT32
            smallest: Element = "float" if input_type.element == "float" or fits else "double"
            return ValueType(smallest)
        raise OpError(f"takes numbers, not {input_type}")

    def spark_value(self, x: Column, input_type: ValueType, state: State) -> Column:
        from pyspark.sql import functions as F

        wide = "bigint" if input_type.is_integer else "double"
        as_ = int if input_type.is_integer else float
        y = x.cast(wide)
        held = (y >= F.lit(as_(self.min)).cast(wide)) & (y <= F.lit(as_(self.max)).cast(wide))
        return F.when(held, y).cast(self.type_of(input_type).element)

    def arrow_value(self, x: pa.Array, input_type: ValueType, state: State) -> pa.Array:
        out = self.type_of(input_type).arrow
        y = x.cast(pa.int64()) if input_type.is_integer else doubles(x)
        as_ = int if input_type.is_integer else float
        low, high = pa.scalar(as_(self.min), y.type), pa.scalar(as_(self.max), y.type)
        held = pc.and_(pc.greater_equal(y, low), pc.less_equal(y, high))
        reduced = pc.if_else(held, y, pa.scalar(None, y.type))
        return reduced.cast(out) if input_type.is_integer else _rounded(reduced, out)


def _rounded(x: pa.Array, out: pa.DataType) -> pa.Array:
    """Doubles within float's range as float, or as they are."""
    if out != pa.float32():
        return x
    values = x.to_numpy(zero_copy_only=False).astype(np.float32)
    return pa.array(values, out, from_pandas=True)


#: Whole numbers up to here, and powers of ten up to 10**22, are doubles; so their quotient is rounded once.
_EXACT = 2**53
_EXACT_POWER = 22


class FromDecimal(Elementwise):
    """Decimals as numbers, each the nearest double; or as texts, in plain notation with all digits of the scale (7 as a
    decimal(4,2) is `7.00`). Other columns pass unchanged.
    """

    name: ClassVar[str] = "from_decimal"

    to: Literal["double", "string"]

    def type_of(self, input_type: ValueType) -> ValueType:
        return ValueType(self.to) if input_type.element == "decimal" else input_type

    def spark_value(self, x: Column, input_type: ValueType, state: State) -> Column:
        return x.cast(self.to) if input_type.element == "decimal" else x

    def arrow_value(self, x: pa.Array, input_type: ValueType, state: State) -> pa.Array:
        if input_type.element != "decimal":
            return x
        return decimal_doubles(x) if self.to == "double" else decimal_texts(x)


def decimal_doubles(x: pa.Array) -> pa.Array:
    """decimal128 as float64, rounded to nearest; nulls stay. (Arrow's own cast is off by a bit now and then.)"""
    scale = x.type.scale
    high, low = _halves(x)
    is_valid = x.is_valid().to_numpy(zero_copy_only=False)
    # The 128 bits are of one 64-bit number.
    small = (high == low >> 63) & (low >= -_EXACT) & (low <= _EXACT)
    out = low.astype(np.float64) / np.float64(10.0**scale) if scale <= _EXACT_POWER else np.zeros(len(x))
    if scale > _EXACT_POWER:
        small[:] = False
    for i in np.flatnonzero(is_valid & ~small).tolist():
        out[i] = float(x[i].as_py())
    return pa.array(out, pa.float64(), mask=~is_valid)


def decimal_texts(x: pa.Array) -> pa.Array:
    """decimal128 in plain notation, as Spark spells it; nulls stay."""
    return pa.array([None if v is None else f"{v:f}" for v in x.to_pylist()], pa.string())


def _halves(x: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the high and the low 64 bits of each value; of a null any. int64 [n] each."""
    buffer = x.buffers()[1]
    if buffer is None or not len(x):
        empty = np.zeros(len(x), np.int64)
        return empty, empty.copy()
    words = np.frombuffer(buffer, np.int64)[2 * x.offset : 2 * (x.offset + len(x))]
    return words[1::2], words[0::2]


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


class FillMissing(WithIndicator):
    """Null and NaN become `value`; in lists, null elements do (a null list is an empty one).

    Integers stay integers where `value` is one, so that `categorify` can follow; other numbers become double.

    With `indicator`, each column that is no list also gives `<c>_missing`: true where the value was missing (see
    `WithIndicator`). NVTabular's FillMissing with add_binary_cols.
    """

    name: ClassVar[str] = "fill_missing"
    onnx: ClassVar[str] = "headrace.export.features.operators:fill_missing"

    #: A text for a text column, else a number.
    value: StrictBool | StrictInt | StrictFloat | StrictStr = 0

    @field_validator("value")
    @classmethod
    def _finite(cls, value: bool | int | float | str) -> bool | int | float | str:
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("must be finite")
        return value

    def type_of(self, input_type: ValueType) -> ValueType:
        if input_type.element == "string":
            if not isinstance(self.value, str):
                raise OpError(f"is text, so `value` must be a text, not {self.value!r}")
            return input_type
        if isinstance(self.value, str):
            raise OpError(f"is {input_type}, so `value` must be a number, not {self.value!r}")
        if input_type.is_integer and isinstance(self.value, int):
            if not -(2**63) <= self.value < 2**63:
                raise OpError(f"`value` {self.value} does not fit 64 bits")
            return ValueType("bigint")
        if input_type.is_number:
            return ValueType("double")
        raise OpError(f"takes numbers and text, not {input_type}")

    def spark_value(self, x: Column, input_type: ValueType, state: State) -> Column:
        from pyspark.sql import functions as F

        out = self.type_of(input_type)
        return F.coalesce(x.cast(out.element), F.lit(self._as(out)).cast(out.element))

    def arrow_value(self, x: pa.Array, input_type: ValueType, state: State) -> pa.Array:
        out = self.type_of(input_type)
        x = doubles(x) if out.element == "double" else x.cast(out.arrow)
        return pc.fill_null(x, pa.scalar(self._as(out), out.arrow))

    def _as(self, out: ValueType) -> float | int | str:
        return float(self.value) if out.element == "double" else self.value


class FillMedian(WithIndicator, QuantileOp):
    """Numbers to double: null and NaN become the median over the training range (0 where there is none).

    NVTabular's FillMedian; `indicator` (see `WithIndicator`) is its add_binary_cols. Of an even number of values the
    mean of the two in the middle. It is counted, not sampled: values are rounded to `significant_bits` bits and
    counted, so days merge and partitioning changes nothing.
    """

    name: ClassVar[str] = "fill_median"
    onnx: ClassVar[str] = "headrace.export.features.operators:fill_median"

    def type_of(self, input_type: ValueType) -> ValueType:
        return number(input_type, "double")

    def finish(self, partials: Partials, types: Mapping[str, ValueType]) -> FittedState:
        states = {}
        for name in types:
            values, upto = cumulated(partials[name])
            n = int(upto[-1]) if len(upto) else 0
            middle = median(values, upto) if n else 0.0
            states[name] = {"median": middle, "count": n}
        return FittedState(states)

    def spark_value(self, x: Column, input_type: ValueType, state: State) -> Column:
        from pyspark.sql import functions as F

        return F.coalesce(x.cast("double"), F.lit(float(state["median"])))

    def arrow_value(self, x: pa.Array, input_type: ValueType, state: State) -> pa.Array:
        return pc.fill_null(doubles(x), float(state["median"]))
