"""Timestamps and dates as whole microseconds, in both engines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.compute import pc
from headrace.features.types import ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column

SECOND_MICROS = 1_000_000
HOUR_MICROS = 3_600 * SECOND_MICROS
DAY_MICROS = 24 * HOUR_MICROS

_DURATION = re.compile(r"(\d+(?:\.\d+)?) *(second|minute|hour|day|week)s?")
_UNITS = {
    "second": SECOND_MICROS,
    "minute": 60 * SECOND_MICROS,
    "hour": HOUR_MICROS,
    "day": DAY_MICROS,
    "week": 7 * DAY_MICROS,
}


def spark_micros(x: Column, input_type: ValueType) -> Column:
    """Microseconds since 1970 (UTC) of a timestamp (years 1698 to 2242) or of a date's midnight: bigint.

    Not Spark's unix_micros and unix_date, which RAPIDS does not have. A timestamp as a double of seconds is right to
    half a microsecond in those years, so what is left of it beside its whole seconds can be rounded to the exact
    microseconds.
    """
    from pyspark.sql import functions as F

    if input_type.element == "date":
        return F.datediff(x, F.lit("1970-01-01").cast("date")).cast("bigint") * F.lit(DAY_MICROS).cast("bigint")
    seconds = x.cast("bigint")
    rest = x.cast("double") - seconds.cast("double")
    return seconds * F.lit(SECOND_MICROS).cast("bigint") + F.rint(rest * F.lit(float(SECOND_MICROS))).cast("bigint")


def micros_of_duration(text: object) -> int:
    """Microseconds of a text such as `30 minutes`, `7 days`, `1.5 hours`; whole numbers of microseconds stay.

    Raises:
        ValueError: it is no such text.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _DURATION.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ValueError("write a number and a unit, as in 30 minutes or 7 days (seconds, minutes, hours, days, weeks)")
    return round(float(match[1]) * _UNITS[match[2]])


def arrow_micros(x: pa.Array) -> NDArray[np.int64]:
    """Return the same of an Arrow array: int64 [n], 0 for null."""
    if pa.types.is_date(x.type):
        days: NDArray[np.int32] = pc.fill_null(x.cast(pa.int32()), 0).to_numpy(zero_copy_only=False)
        return days.astype(np.int64) * np.int64(DAY_MICROS)
    return np.asarray(pc.fill_null(x.cast(pa.int64()), 0).to_numpy(zero_copy_only=False), np.int64)
