"""Columns of text, or of JSON numbers, as the declared types.

Every function gives null for what is not surely the value that headrace.lake.landing.exact_casts makes of it: a null of
what was present is a row for those rules, not a bad one.

Dates and timestamps are read digit by digit (by native/cpp/times.cpp where it is built), in the spellings that logs
have. The C++ library of lines is loaded here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.compute import native
from headrace.config.schema import EpochUnit, decimal_digits

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
#: Types of scalar columns; decimals aside, see `arrow_type`.
ARROW_TYPES = {
    "string": pa.string(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "timestamp": TIMESTAMP,
    "timestamp_ntz": pa.timestamp("us"),
    "date": pa.date32(),
    # Kept as its SHA-256, in hexadecimal.
    "binary": pa.string(),
}
_TRUE, _FALSE = ["true", "t", "yes", "y", "1"], ["false", "f", "no", "n", "0"]
_FLOAT = r"^-?(?:[0-9]+[.]?[0-9]*|[.][0-9]+)(?:[eE][+-]?[0-9]{1,3})?$"
_WHOLE_NUMBER = r"^-?[0-9]{1,18}(?:[.][0-9]{0,18}(?:[eE][+]?[0-9]{1,2})?|[eE][+]?[0-9]{1,2})$"
_LEAST = {pa.int8(): -(1 << 7), pa.int16(): -(1 << 15), pa.int32(): -(1 << 31), pa.int64(): -(1 << 63)}
_SURE_DIGITS = {pa.int8(): 2, pa.int16(): 4, pa.int32(): 9, pa.int64(): 18}
#: Digits of which every integer is an int64.
_INT64_DIGITS = 18
#: Below it every integer is a double.
_EXACT = float(1 << 53)
#: Version of the C++ library. Raise it with that of native/cpp/json_lines.cpp when a function's name, arguments or
#: meaning change.
_LINES_VERSION = 1
_C_INT64, _C_INT, _POINTER = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
#: The C++ loops over lines of text (native/cpp: json_lines, text_lines, times), where `make native` has built them.
LINES = native.Interface(
    "libheadrace_lines.so",
    "headrace_lines_version",
    {
        "headrace_json_lines": (_POINTER, (ctypes.c_char_p, _POINTER, _POINTER, _C_INT64)),
        "headrace_json_lines_free": (None, (_POINTER,)),
        "headrace_json_lines_column": (None, (_POINTER, _C_INT64, _POINTER, _POINTER, _POINTER)),
        "headrace_json_lines_parse": (_C_INT64, (_POINTER, _POINTER, _POINTER, _C_INT64, _C_INT, _POINTER)),
        "headrace_json_lines_other": (_POINTER, (_POINTER, _C_INT64, _POINTER)),
        "headrace_newlines": (None, (_POINTER, _C_INT64, _C_INT64, _POINTER)),
        "headrace_control_characters": (None, (_POINTER, _C_INT64, _POINTER)),
        "headrace_instants": (None, (_POINTER, _POINTER, _C_INT64, _POINTER, _POINTER, _POINTER)),
    },
)


@cache
def lines_library() -> ctypes.CDLL | None:
    """Return the C++ library, or None where it was not built (or from other sources, which is logged)."""
    return LINES.load(LINES.path(), _LINES_VERSION)


def offsets_of(text: pa.StringArray) -> tuple[I64, npt.NDArray[Any]]:
    """Return (offsets int64 [rows + 1], bytes uint8): row i is bytes[offsets[i]:offsets[i + 1]]; a null is empty."""
    _, offsets, data = text.buffers()
    if offsets is None or not len(text):
        return np.zeros(len(text) + 1, np.int64), np.zeros(0, np.uint8)
    row_offsets = np.frombuffer(offsets, np.int32, len(text) + 1, text.offset * 4).astype(np.int64)
    return row_offsets, np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)


def lengths(text: pa.StringArray) -> I64:
    """Return bytes of each row; int64 [rows]."""
    return np.diff(offsets_of(text)[0])


def has_byte(text: pa.StringArray, *signs: str) -> bool:
    """Return whether one of some ASCII characters is in the column."""
    offsets, data = offsets_of(text)
    content = data[offsets[0] : offsets[-1]]
    return any(bool((content == ord(sign)).any()) for sign in signs)


def bounds(lines: pa.BinaryArray) -> tuple[int, int]:
    """Return the first byte of a buffer that rows take, and the byte behind their last."""
    offsets = np.frombuffer(lines.buffers()[1], np.int32, len(lines) + 1, lines.offset * 4)
    return int(offsets[0]), int(offsets[-1])


def dates(text: pa.StringArray) -> pa.Array:
    """Convert yyyy-MM-dd to date32."""
    days, good = np.zeros(len(text), np.int64), np.zeros(len(text), np.bool_)
    for rows, matrix in _by_length(text, lambda n: n == _DATE):
        days[rows], good[rows] = _date(matrix)
    return pa.array(days.astype(np.int32), pa.int32(), mask=~good).cast(pa.date32())


def timestamps(text: pa.StringArray, timezone: str) -> pa.Array:
    """Convert ISO 8601 to timestamp[us, UTC]; without an offset in `timezone`."""
    moments = _of_common_form(text, timezone)
    if moments.null_count == text.null_count:
        return moments
    unusual = pc.if_else(pc.and_(moments.is_null(), pc.match_substring_regex(text, _OTHER_FORM)), text, None)
    if unusual.null_count == len(unusual):
        return moments
    for pattern, replacement in _TO_COMMON_FORM:
        unusual = pc.replace_substring_regex(unusual, pattern, replacement)
    return pc.coalesce(moments, _of_common_form(unusual, timezone))


def _of_common_form(text: pa.StringArray, timezone: str) -> pa.Array:
    """Convert `timestamps` of the spellings that most logs have."""
    micros, good, local = _instants(text)
    if timezone != "UTC" and local.any():
        _to_utc(micros, good, local, timezone)
    return pa.array(micros, pa.int64(), mask=~good).cast(TIMESTAMP)


def _local_times(text: pa.StringArray) -> pa.Array:
    """Convert ISO 8601 without an offset to timestamp[us]: the time as it is written."""
    micros, good, local = _instants(text)
    return pa.array(micros, pa.int64(), mask=~(good & local)).cast(pa.timestamp("us"))


def since_1970(number: pa.Array, unit: EpochUnit) -> pa.Array:
    """Convert integers or decimals since 1970 to timestamp[us, UTC]."""
    if unit == "epoch_nanoseconds":  # what is beyond microseconds is cut
        whole_micros = number.fill_null(0).to_numpy(zero_copy_only=False) // 1_000
        return pa.array(whole_micros, pa.int64(), mask=number.is_null().to_numpy(zero_copy_only=False)).cast(TIMESTAMP)
    factor = {"epoch_seconds": 1_000_000, "epoch_milliseconds": 1_000, "epoch_microseconds": 1}[unit]
    most = _LAST_MICROS // factor
    if pa.types.is_decimal(number.type):
        number = pc.multiply(number, pa.scalar(factor, pa.decimal128(8, 0))).cast(pa.int64(), safe=False)
        factor = 1
    inside = pc.and_(pc.greater_equal(number, _FIRST_MICROS // factor), pc.less_equal(number, most))
    micros = pc.multiply(pc.if_else(inside, number, None), factor)
    is_in_years = pc.and_(pc.greater_equal(micros, _FIRST_MICROS), pc.less_equal(micros, _LAST_MICROS))
    return pc.if_else(is_in_years, micros, None).cast(TIMESTAMP)


def _by_length(text: pa.StringArray, is_length: Callable[[int], bool]) -> Iterator[tuple[Any, Matrix]]:
    """Yield (rows, their characters [rows, length]) for each length that `is_length` admits."""
    size = lengths(text)
    offsets, data = offsets_of(text)
    all_lengths = np.unique(size)
    if len(all_lengths) == 1 and len(text):
        n = int(all_lengths[0])
        if is_length(n):
            yield slice(None), data[offsets[0] : offsets[-1]].reshape(len(text), n)
        return
    for n in all_lengths.tolist():
        if is_length(n):
            rows = np.flatnonzero(size == n)
            yield rows, data[offsets[rows][:, None] + np.arange(n)]


def _digits(matrix: Matrix, first: int, last: int, good: Mask) -> I64:
    """Return the number in columns [first, last); clears `good` where one is no digit."""
    value = np.zeros(len(matrix), np.int64)
    for k in range(first, last):
        digit = matrix[:, k] - np.uint8(_ZERO)
        good &= digit < 10
        value = value * 10 + digit
    return value


def _is(matrix: Matrix, place: int, signs: str) -> Mask:
    column = matrix[:, place]
    matches: Mask = column == ord(signs[0])
    for sign in signs[1:]:
        matches |= column == ord(sign)
    return matches


def _date(matrix: Matrix) -> tuple[I64, Mask]:
    """Return (days since 1970, whether it is a date) of the first ten columns."""
    good = _is(matrix, 4, "-") & _is(matrix, 7, "-")
    year, month, day = _digits(matrix, 0, 4, good), _digits(matrix, 5, 7, good), _digits(matrix, 8, 10, good)
    good &= (month >= 1) & (month <= 12) & (day >= 1) & (year >= _FIRST_YEAR) & (year <= _LAST_YEAR)
    leap = (year % 4 == 0) & ((year % 100 != 0) | (year % 400 == 0))
    index = np.clip(month, 1, 12) - 1
    good &= day <= _DAYS[index] + (leap & (month == 2))
    begin = (np.where(good, year, 1970) - 1970) * 12 + index
    return begin.astype("M8[M]").astype("M8[D]").astype(np.int64) + day - 1, good


def _instants(text: pa.StringArray) -> tuple[I64, Mask, Mask]:
    """Return (microseconds since 1970, whether it is a time, whether it has no offset) of texts."""
    n, lib = len(text), lines_library()
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
    """Return `_instants` of texts of one length."""
    n, length = matrix.shape
    micros, good, local = np.zeros(n, np.int64), np.zeros(n, np.bool_), np.zeros(n, np.bool_)
    zulu = _is(matrix, length - 1, "Z")
    offset = np.zeros(n, np.bool_)
    if length >= _MINUTES + _OFFSET:
        offset = ~zulu & _is(matrix, length - _OFFSET, "+-") & _is(matrix, length - 3, ":")
    for rows, tail in ((zulu, 1), (offset, _OFFSET), (~zulu & ~offset, 0)):
        if not rows.any():
            continue
        texts = matrix if rows.all() else matrix[rows]
        moments, fine = _moment(texts, length - tail, may_be_date=tail == 0)
        if tail == _OFFSET:
            sign = length - _OFFSET
            hours, minutes = _digits(texts, sign + 1, sign + 3, fine), _digits(texts, sign + 4, sign + 6, fine)
            fine &= (hours <= _MOST_OFFSET) & (minutes < 60)
            shift = (hours * 60 + minutes) * 60_000_000
            moments = np.where(_is(texts, sign, "-"), moments + shift, moments - shift)
        micros[rows], good[rows], local[rows] = moments, fine, tail == 0
    return micros, good, local


def _moment(matrix: Matrix, length: int, may_be_date: bool) -> tuple[I64, Mask]:
    """Return (microseconds since 1970, whether it is a time) of the first `length` columns."""
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


def zone_offset(local_micros: int, timezone: str) -> int:
    """Return the microseconds by which a local time is ahead of UTC: before the change where clocks change at it.

    So it is the earlier of two times where clocks go back, and later by the gap where they pass over it.
    """
    # Python's calendar has no year 0, in which all zones have their first offset.
    local = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=max(local_micros, _FIRST_MICROS))
    shift = local.replace(tzinfo=_zone(timezone)).utcoffset()
    assert shift is not None
    return shift // timedelta(microseconds=1)


@cache
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)


def element_type(declared: str) -> str | None:
    """Return `int` of `array<int>`; None for a scalar type."""
    return declared[len("array<") : -1] if declared.startswith("array<") else None


def arrow_type(declared: str) -> pa.DataType:
    """Return the Arrow type of a declared one. Raises KeyError for one that is not known here."""
    if digits := decimal_digits(declared):
        return pa.decimal128(*digits)
    element = element_type(declared)
    return ARROW_TYPES[declared] if element is None else pa.list_(pa.field("element", ARROW_TYPES[element]))


def from_text(text: pa.StringArray, declared: str, timezone: str, unit: EpochUnit | None) -> pa.Array:
    """Convert a scalar column that a file spells as text. `unit`: of a column of `source.timestamps`."""
    if declared == "string":
        return text
    if unit is not None:
        return _epoch(text, unit)
    if declared == "timestamp":
        return timestamps(text, timezone)
    if declared == "timestamp_ntz":
        return _local_times(text)
    if declared == "date":
        return dates(text)
    if declared == "boolean":
        return _booleans(text)
    if declared == "binary":
        return pa.nulls(len(text), pa.string())
    if digits := decimal_digits(declared):
        return _decimals(text, *digits)
    type_ = ARROW_TYPES[declared]
    return _integers(text, type_) if pa.types.is_integer(type_) else _floats(text, type_)


def from_json(value: pa.Array, declared: str, timezone: str, unit: EpochUnit | None) -> pa.Array:
    """Convert a scalar column of JSON values: of strings, of booleans, of int64 or of double numbers."""
    if pa.types.is_string(value.type):
        return from_text(value, declared, timezone, unit)
    type_ = arrow_type(declared)
    if pa.types.is_boolean(value.type):
        return value if declared == "boolean" else pa.nulls(len(value), type_)
    if unit is not None and pa.types.is_integer(value.type):
        return since_1970(value, unit)
    if declared == "string" and pa.types.is_integer(value.type):
        return value.cast(pa.string())
    if declared in ("tinyint", "smallint", "int") and pa.types.is_integer(value.type):
        inside = pc.and_(pc.greater_equal(value, _LEAST[type_]), pc.less(value, -_LEAST[type_]))
        return pc.if_else(inside, value, None).cast(type_)
    if declared == "bigint" and pa.types.is_integer(value.type):
        return value
    if pa.types.is_decimal(type_) and pa.types.is_integer(value.type):
        return _decimals_of_integers(value, type_)
    if declared in ("float", "double") and pa.types.is_floating(value.type):
        return _json_floats(value, type_)
    return pa.nulls(len(value), type_)


def split_list(text: pa.StringArray, separator: str) -> pa.ListArray:
    """Split lists in one field: list<string>, null for null."""
    return pc.split_pattern(text, separator)


def list_of(lists: pa.ListArray, values: pa.Array, declared: str) -> pa.ListArray:
    """Return lists with other elements, in the declared type; null where an element was lost."""
    old_values, offsets = lists.values, lists.offsets
    missing = lists.is_null()
    lost = np.flatnonzero(_numpy(pc.and_(values.is_null(), old_values.is_valid())))
    if len(lost):
        rows = np.searchsorted(offsets.to_numpy(), lost, side="right") - 1
        lost_rows = _numpy(missing).copy()
        lost_rows[rows] = True
        missing = pa.array(lost_rows)
    lists_of_values = pa.ListArray.from_arrays(offsets, values, type=arrow_type(declared))
    return pc.if_else(missing, None, lists_of_values) if pc.any(missing).as_py() else lists_of_values


def _numpy(array: pa.Array) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return values


def _integers(text: pa.StringArray, type_: pa.DataType) -> pa.Array:
    plain = _from_digits(text, type_)
    if plain.null_count == text.null_count:
        return plain
    # Whole numbers as programs write those of a column of floats: 100054.0, 1.2E7.
    unusual = pc.if_else(plain.is_null(), _matching(text, _WHOLE_NUMBER), None)
    try:
        exact = unusual.cast(pa.decimal128(38, 18))
        numbers = pc.if_else(pc.equal(pc.floor(exact), exact), exact, None).cast(pa.int64())
        inside = pc.and_(pc.greater_equal(numbers, _LEAST[type_]), pc.less_equal(numbers, -(_LEAST[type_] + 1)))
        # Scientific notation may be that of a double, to which a larger number was rounded.
        is_sure = pc.or_(pc.less(pc.abs(numbers), int(_EXACT)), pc.invert(pc.match_substring_regex(unusual, "[eE]")))
        inside = pc.and_(inside, is_sure)
        return pc.coalesce(plain, pc.if_else(inside, numbers, None).cast(type_))
    except pa.ArrowInvalid:  # one has too many digits
        return plain


def _from_digits(text: pa.StringArray, type_: pa.DataType) -> pa.Array:
    if not has_byte(text, "x", "X"):  # Arrow reads 0x10
        try:
            return text.cast(type_)
        except pa.ArrowInvalid:
            pass
    sure = _SURE_DIGITS[type_]
    for digits in (sure + 1, sure):
        try:
            return _matching(text, f"^-?[0-9]{{1,{digits}}}$").cast(type_)
        except pa.ArrowInvalid:
            continue  # a number of as many digits that is out of range
    raise AssertionError(f"{sure} digits are out of the range of {type_}")


def _decimals(text: pa.StringArray, precision: int, scale: int) -> pa.Array:
    """Convert numbers in digits, with at most as many of them as the type has room for."""
    type_ = pa.decimal128(precision, scale)
    if precision == scale:
        return pa.nulls(len(text), type_)
    fraction = f"(?:[.][0-9]{{1,{scale}}})?" if scale else ""
    return _matching(text, f"^-?[0-9]{{1,{precision - scale}}}{fraction}$").cast(type_)


def _decimals_of_integers(value: pa.Array, type_: pa.Decimal128Type) -> pa.Array:
    most = 10 ** min(type_.precision - type_.scale, _INT64_DIGITS)
    inside = pc.and_(pc.greater(value, -most), pc.less(value, most))
    return pc.if_else(inside, value, None).cast(pa.decimal128(19, 0)).cast(type_)


def _floats(text: pa.StringArray, type_: pa.DataType) -> pa.Array:
    try:
        value = text.cast(type_)
    except pa.ArrowInvalid:
        value = _matching(text, _FLOAT).cast(type_)
    return _finite(value)


def _finite(value: pa.Array) -> pa.Array:
    finite = pc.is_finite(value)
    return value if pc.all(finite).as_py() in (True, None) else pc.if_else(finite, value, None)


def _json_floats(value: pa.Array, type_: pa.DataType) -> pa.Array:
    """Convert JSON numbers as Spark does: to a double's text, and from it to the type."""
    value = _finite(value)
    number = _numpy(pc.fill_null(value, 1.0))
    # `-0` is the integer 0, `-0.0` is not: Arrow tells them apart no more.
    unsure = (number == 0) & np.signbit(number)
    if type_ == pa.float32():
        bits = number.view(np.int64) & ((1 << 29) - 1)
        between = (bits == 1 << 28) & (np.trunc(number) != number)
        unsure |= between | (np.abs(number) >= _EXACT)
        # Where bits of a double are below the smallest float's, there are more places between two floats.
        unsure |= (np.abs(number) < float(np.finfo(np.float32).tiny)) & (number != 0)
    if unsure.any():
        value = pc.if_else(pa.array(unsure), None, value)
    return value if type_ == pa.float64() else _finite(value.cast(type_, safe=False))


def _booleans(text: pa.StringArray) -> pa.Array:
    place = pc.index_in(pc.ascii_lower(text), pa.array(_TRUE + _FALSE))
    return pc.less(place, len(_TRUE))


def _epoch(text: pa.StringArray, unit: EpochUnit) -> pa.Array:
    integers = _integers(text, pa.int64())
    moments = since_1970(integers, unit)
    if integers.null_count == text.null_count:
        return moments
    if unit in ("epoch_microseconds", "epoch_nanoseconds"):
        return moments
    digits = 6 if unit == "epoch_seconds" else 3
    parts = _matching(text, rf"^-?[0-9]{{1,15}}[.][0-9]{{1,{digits}}}$").cast(pa.decimal128(24, digits))
    return pc.coalesce(moments, since_1970(parts, unit))


def _matching(text: pa.StringArray, pattern: str) -> pa.StringArray:
    return pc.if_else(pc.match_substring_regex(text, pattern), text, None)
