"""Columns of text, or of JSON numbers, to the declared types.

Every function gives null for what is not surely the value that headrace.lake.ingest.typed_rows makes of it: a null of
what was there is a row for those rules, not a bad one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.lake.blocks.text import has_byte
from headrace.lake.blocks.times import TIMESTAMP, dates, since_1970, timestamps
from headrace.schema import EpochUnit

ARROW_TYPES = {
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "timestamp": TIMESTAMP,
    "date": pa.date32(),
}
_TRUE, _FALSE = ["true", "t", "yes", "y", "1"], ["false", "f", "no", "n", "0"]
_FLOAT = r"^-?(?:[0-9]+[.]?[0-9]*|[.][0-9]+)(?:[eE][+-]?[0-9]{1,3})?$"
_WHOLE = r"^-?[0-9]{1,18}(?:[.][0-9]{0,18}(?:[eE][+]?[0-9]{1,2})?|[eE][+]?[0-9]{1,2})$"
_LEAST = {pa.int32(): -(1 << 31), pa.int64(): -(1 << 63)}
_SURE_DIGITS = {pa.int32(): 9, pa.int64(): 18}
#: Below it every integer is a double.
_EXACT = float(1 << 53)


def element_type(declared: str) -> str | None:
    """`int` of `array<int>`; None for a scalar type."""
    return declared[len("array<") : -1] if declared.startswith("array<") else None


def arrow_type(declared: str) -> pa.DataType:
    """The Arrow type of a declared one. Raises KeyError for one that is not known here."""
    element = element_type(declared)
    return ARROW_TYPES[declared] if element is None else pa.list_(pa.field("element", ARROW_TYPES[element]))


def from_text(text: pa.StringArray, declared: str, timezone: str, unit: EpochUnit | None) -> pa.Array:
    """A scalar column that a file spells as text. `unit`: of a column of `source.timestamps`."""
    if declared == "string":
        return text
    if unit is not None:
        return _epoch(text, unit)
    if declared == "timestamp":
        return timestamps(text, timezone)
    if declared == "date":
        return dates(text)
    if declared == "boolean":
        return _booleans(text)
    type_ = ARROW_TYPES[declared]
    return _integers(text, type_) if pa.types.is_integer(type_) else _floats(text, type_)


def from_json(value: pa.Array, declared: str, timezone: str, unit: EpochUnit | None) -> pa.Array:
    """A scalar column of JSON values: of strings, of booleans, of int64 or of double numbers."""
    if pa.types.is_string(value.type):
        return from_text(value, declared, timezone, unit)
    type_ = ARROW_TYPES[declared]
    if pa.types.is_boolean(value.type):
        return value if declared == "boolean" else pa.nulls(len(value), type_)
    if unit is not None and pa.types.is_integer(value.type):
        return since_1970(value, unit)
    if declared == "string" and pa.types.is_integer(value.type):
        return value.cast(pa.string())
    if declared == "int" and pa.types.is_integer(value.type):
        inside = pc.and_(pc.greater_equal(value, -(1 << 31)), pc.less(value, 1 << 31))
        return pc.if_else(inside, value, None).cast(type_)
    if declared == "bigint" and pa.types.is_integer(value.type):
        return value
    if declared in ("float", "double") and pa.types.is_floating(value.type):
        return _json_floats(value, type_)
    return pa.nulls(len(value), type_)


def split_list(text: pa.StringArray, separator: str) -> pa.ListArray:
    """Lists in one field: list<string>, null for null."""
    return pc.split_pattern(text, separator)


def list_of(lists: pa.ListArray, values: pa.Array, declared: str) -> pa.ListArray:
    """Lists with other elements, in the declared type; null where an element was lost."""
    before, offsets = lists.values, lists.offsets
    missing = lists.is_null()
    lost = np.flatnonzero(_numpy(pc.and_(values.is_null(), before.is_valid())))
    if len(lost):
        rows = np.searchsorted(offsets.to_numpy(), lost, side="right") - 1
        gone = _numpy(missing).copy()
        gone[rows] = True
        missing = pa.array(gone)
    made = pa.ListArray.from_arrays(offsets, values, type=arrow_type(declared))
    return pc.if_else(missing, None, made) if pc.any(missing).as_py() else made


def _numpy(array: pa.Array) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return found


def _integers(text: pa.StringArray, type_: pa.DataType) -> pa.Array:
    found = _from_digits(text, type_)
    if found.null_count == text.null_count:
        return found
    # Whole numbers as programs write those of a column of floats: 100054.0, 1.2E7.
    other = pc.if_else(found.is_null(), _matching(text, _WHOLE), None)
    try:
        exact = other.cast(pa.decimal128(38, 18))
        whole = pc.if_else(pc.equal(pc.floor(exact), exact), exact, None).cast(pa.int64())
        inside = pc.and_(pc.greater_equal(whole, _LEAST[type_]), pc.less_equal(whole, -(_LEAST[type_] + 1)))
        # Scientific notation may be that of a double, to which a larger number was rounded.
        is_sure = pc.or_(pc.less(pc.abs(whole), int(_EXACT)), pc.invert(pc.match_substring_regex(other, "[eE]")))
        inside = pc.and_(inside, is_sure)
        return pc.coalesce(found, pc.if_else(inside, whole, None).cast(type_))
    except pa.ArrowInvalid:  # one has too many digits
        return found


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
    """Spark goes from a JSON number to a double's text, and from it to the type."""
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
    whole = _integers(text, pa.int64())
    found = since_1970(whole, unit)
    if whole.null_count == text.null_count:
        return found
    if unit in ("epoch_microseconds", "epoch_nanoseconds"):
        return found
    digits = 6 if unit == "epoch_seconds" else 3
    parts = _matching(text, rf"^-?[0-9]{{1,15}}[.][0-9]{{1,{digits}}}$").cast(pa.decimal128(24, digits))
    return pc.coalesce(found, since_1970(parts, unit))


def _matching(text: pa.StringArray, pattern: str) -> pa.StringArray:
    return pc.if_else(pc.match_substring_regex(text, pattern), text, None)
