"""Text to dates and timestamps, column by column: the spellings of `table.columns` that logs have, checked digit by
digit (by native/cpp/times.cpp where it is built). A value in another one becomes null.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.lake.blocks import native
from headrace.lake.blocks.text import lengths, offsets_of
from headrace.schema import EpochUnit

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Matrix = npt.NDArray[np.uint8]

TIMESTAMP = pa.timestamp("us", tz="UTC")
_ZERO = ord("0")
#: Years of which calendars and time zone databases differ in nothing.
_FIRST_YEAR, _LAST_YEAR = 1900, 9998
_FIRST_ZONED, _LAST_ZONED = 1970, 2036
_DAYS = np.array([31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31], np.int64)
#: Characters of yyyy-MM-dd, with minutes, with seconds.
_DATE, _MINUTES, _SECONDS = 10, 16, 19
_OFFSET = 6
#: Hours that an offset may have.
_MOST_OFFSET = 17
#: Date and time with a comma before the fraction, more digits of it, a blank before the zone, its name, or a short
#: offset; and what makes them the most usual spelling.
_OTHER_FORM = (
    r"^.{10}[T ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:[.,][0-9]{1,9})?)?(?: ?(?:Z|UTC|GMT|[+-][0-9]{2}(?::?[0-9]{2})?))?$"
)
_TO_COMMON_FORM = (
    (r"^(.{19}),", r"\1."),
    (r"^(.{19}[.][0-9]{6})[0-9]+", r"\1"),
    (r" ?(?:Z|UTC|GMT)$", "Z"),
    (r"^(.{16,}?) ?([+-][0-9]{2}):?([0-9]{2})$", r"\1\2:\3"),
    (r"^(.{16,}?) ?([+-][0-9]{2})$", r"\1\2:00"),
)
_FIRST_MICROS, _LAST_MICROS = -62_135_596_800_000_000, 253_402_300_799_999_999


def dates(text: pa.StringArray) -> pa.Array:
    """yyyy-MM-dd to date32."""
    days, good = np.zeros(len(text), np.int64), np.zeros(len(text), np.bool_)
    for rows, matrix in _by_length(text, lambda n: n == _DATE):
        days[rows], good[rows] = _date(matrix)
    return pa.array(days.astype(np.int32), pa.int32(), mask=~good).cast(pa.date32())


def timestamps(text: pa.StringArray, timezone: str) -> pa.Array:
    """ISO 8601 to timestamp[us, UTC]; without an offset in `timezone`."""
    found = _of_common_form(text, timezone)
    if found.null_count == text.null_count:
        return found
    other = pc.if_else(pc.and_(found.is_null(), pc.match_substring_regex(text, _OTHER_FORM)), text, None)
    if other.null_count == len(other):
        return found
    for pattern, replacement in _TO_COMMON_FORM:
        other = pc.replace_substring_regex(other, pattern, replacement)
    return pc.coalesce(found, _of_common_form(other, timezone))


def _of_common_form(text: pa.StringArray, timezone: str) -> pa.Array:
    """`timestamps` of the spellings that most logs have."""
    micros, good, local = _instants(text)
    if timezone != "UTC" and local.any():
        _to_utc(micros, good, local, timezone)
    return pa.array(micros, pa.int64(), mask=~good).cast(TIMESTAMP)


def since_1970(number: pa.Array, unit: EpochUnit) -> pa.Array:
    """Integers or decimals since 1970 to timestamp[us, UTC]."""
    if unit == "epoch_nanoseconds":  # what is beyond microseconds is cut
        whole = number.fill_null(0).to_numpy(zero_copy_only=False) // 1_000
        return pa.array(whole, pa.int64(), mask=number.is_null().to_numpy(zero_copy_only=False)).cast(TIMESTAMP)
    factor = {"epoch_seconds": 1_000_000, "epoch_milliseconds": 1_000, "epoch_microseconds": 1}[unit]
    most = _LAST_MICROS // factor
    if pa.types.is_decimal(number.type):
        number = pc.multiply(number, pa.scalar(factor, pa.decimal128(8, 0))).cast(pa.int64(), safe=False)
        factor = 1
    inside = pc.and_(pc.greater_equal(number, _FIRST_MICROS // factor), pc.less_equal(number, most))
    micros = pc.multiply(pc.if_else(inside, number, None), factor)
    within = pc.and_(pc.greater_equal(micros, _FIRST_MICROS), pc.less_equal(micros, _LAST_MICROS))
    return pc.if_else(within, micros, None).cast(TIMESTAMP)


def _by_length(text: pa.StringArray, wanted: Callable[[int], bool]) -> Iterator[tuple[Any, Matrix]]:
    """(rows, their characters [rows, length]) for each length that is wanted."""
    size = lengths(text)
    offsets, data = offsets_of(text)
    found = np.unique(size)
    if len(found) == 1 and len(text):
        n = int(found[0])
        if wanted(n):
            yield slice(None), data[offsets[0] : offsets[-1]].reshape(len(text), n)
        return
    for n in found.tolist():
        if wanted(n):
            rows = np.flatnonzero(size == n)
            yield rows, data[offsets[rows][:, None] + np.arange(n)]


def _digits(matrix: Matrix, first: int, last: int, good: Mask) -> I64:
    """The number in columns [first, last); clears `good` where one is no digit."""
    value = np.zeros(len(matrix), np.int64)
    for k in range(first, last):
        digit = matrix[:, k] - np.uint8(_ZERO)
        good &= digit < 10
        value = value * 10 + digit
    return value


def _is(matrix: Matrix, place: int, signs: str) -> Mask:
    column = matrix[:, place]
    found: Mask = column == ord(signs[0])
    for sign in signs[1:]:
        found |= column == ord(sign)
    return found


def _date(matrix: Matrix) -> tuple[I64, Mask]:
    """(days since 1970, whether it is a date) of the first ten columns."""
    good = _is(matrix, 4, "-") & _is(matrix, 7, "-")
    year, month, day = _digits(matrix, 0, 4, good), _digits(matrix, 5, 7, good), _digits(matrix, 8, 10, good)
    good &= (month >= 1) & (month <= 12) & (day >= 1) & (year >= _FIRST_YEAR) & (year <= _LAST_YEAR)
    leap = (year % 4 == 0) & ((year % 100 != 0) | (year % 400 == 0))
    index = np.clip(month, 1, 12) - 1
    good &= day <= _DAYS[index] + (leap & (month == 2))
    begin = (np.where(good, year, 1970) - 1970) * 12 + index
    return begin.astype("M8[M]").astype("M8[D]").astype(np.int64) + day - 1, good


def _instants(text: pa.StringArray) -> tuple[I64, Mask, Mask]:
    """(microseconds since 1970, whether it is a time, whether it has no offset) of texts."""
    n, lib = len(text), native.library()
    if lib is not None and n:
        micros, flags = np.empty(n, np.int64), np.empty((2, n), np.uint8)
        offsets, data = offsets_of(text)
        lib.headrace_instants(*(x.ctypes.data for x in (offsets, data)), n, *(x.ctypes.data for x in (micros, *flags)))
        return micros, flags[0].view(np.bool_), flags[1].view(np.bool_)
    micros, good, local = np.zeros(n, np.int64), np.zeros(n, np.bool_), np.zeros(n, np.bool_)
    for rows, matrix in _by_length(text, lambda n: _DATE <= n <= _SECONDS + 7 + _OFFSET):
        micros[rows], good[rows], local[rows] = _instants_of_length(matrix)
    return micros, good, local


def _instants_of_length(matrix: Matrix) -> tuple[I64, Mask, Mask]:
    """`_instants` of texts of one length."""
    n, length = matrix.shape
    micros, good, local = np.zeros(n, np.int64), np.zeros(n, np.bool_), np.zeros(n, np.bool_)
    zulu = _is(matrix, length - 1, "Z")
    offset = np.zeros(n, np.bool_)
    if length >= _MINUTES + _OFFSET:
        offset = ~zulu & _is(matrix, length - _OFFSET, "+-") & _is(matrix, length - 3, ":")
    for rows, tail in ((zulu, 1), (offset, _OFFSET), (~zulu & ~offset, 0)):
        if not rows.any():
            continue
        mine = matrix if rows.all() else matrix[rows]
        found, fine = _moment(mine, length - tail, may_be_date=tail == 0)
        if tail == _OFFSET:
            at = length - _OFFSET
            hours, minutes = _digits(mine, at + 1, at + 3, fine), _digits(mine, at + 4, at + 6, fine)
            fine &= (hours <= _MOST_OFFSET) & (minutes < 60)
            shift = (hours * 60 + minutes) * 60_000_000
            found = np.where(_is(mine, at, "-"), found + shift, found - shift)
        micros[rows], good[rows], local[rows] = found, fine, tail == 0
    return micros, good, local


def _moment(matrix: Matrix, length: int, may_be_date: bool) -> tuple[I64, Mask]:
    """(microseconds since 1970, whether it is a time) of the first `length` columns."""
    days, good = _date(matrix) if length >= _DATE else (np.zeros(len(matrix), np.int64), np.zeros(len(matrix), bool))
    micros = days * 86_400_000_000
    if length == _DATE:
        return micros, good & may_be_date
    if length not in (_MINUTES, _SECONDS) and not _SECONDS + 2 <= length <= _SECONDS + 7:
        return micros, np.zeros(len(matrix), np.bool_)
    good &= _is(matrix, 10, "T ") & _is(matrix, 13, ":")
    hours, minutes = _digits(matrix, 11, 13, good), _digits(matrix, 14, 16, good)
    good &= (hours < 24) & (minutes < 60)
    micros += (hours * 60 + minutes) * 60_000_000
    if length >= _SECONDS:
        good &= _is(matrix, 16, ":")
        seconds = _digits(matrix, 17, 19, good)
        good &= seconds < 60
        micros += seconds * 1_000_000
    if length > _SECONDS:
        good &= _is(matrix, 19, ".")
        micros += _digits(matrix, 20, length, good) * 10 ** (_SECONDS + 7 - length)
    return micros, good


def _to_utc(micros: I64, good: Mask, local: Mask, timezone: str) -> None:
    """Move local times to UTC, the earlier of two where clocks go back; not good where clocks pass over them."""
    year = micros.astype("M8[us]").astype("M8[Y]").astype(np.int64) + 1970
    good &= ~local | ((year >= _FIRST_ZONED) & (year <= _LAST_ZONED))
    rows = np.flatnonzero(local & good)
    naive = pa.array(micros[rows], pa.int64()).cast(pa.timestamp("us"))
    zoned = pc.assume_timezone(naive, timezone, ambiguous="earliest", nonexistent="earliest")
    good[rows] = pc.equal(pc.local_timestamp(zoned), naive).to_numpy(zero_copy_only=False)
    micros[rows] = zoned.cast(pa.int64()).to_numpy()
