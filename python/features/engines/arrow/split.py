"""The split by Arrow columns: the same rows as headrace.features.layout.split's columns give, without Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.features.engines.arrow.dictionary import DictionaryColumn
from headrace.features.layout.split_rule import ColumnRule, Rule, TimeRule

#: A row that is in no split.
DROPPED = -1
_DAY_US = 86_400_000_000

SplitCodes = npt.NDArray[np.int8]
DayNumbers = npt.NDArray[np.int64]


def split_codes(rule: Rule, splits: Sequence[str], columns: Mapping[str, DictionaryColumn]) -> SplitCodes:
    """Each row's position in `splits`, DROPPED for none. int8 [rows]."""
    if isinstance(rule, TimeRule):
        time = columns[rule.column].decode()
        if (one := _one_day(time)) is not None:
            inside = rule.first <= one <= rule.last
            return np.full(len(time), splits.index(rule.split_of(one)) if inside else DROPPED, np.int8)
        day = days(time)
        found = np.where(day >= rule.valid, splits.index("valid"), splits.index("train"))
        if rule.test is not None:
            found = np.where(day >= rule.test, splits.index("test"), found)
        return np.where((day >= rule.first) & (day <= rule.last), found, DROPPED).astype(np.int8)
    if isinstance(rule, ColumnRule):
        column = columns[rule.column]
        found = pc.index_in(column.values.cast(pa.string()), pa.array(splits, pa.string()))
        codes: SplitCodes = pc.fill_null(found, DROPPED).to_numpy(zero_copy_only=False).astype(np.int8)
        return codes if column.indices is None else codes[column.indices]
    train, valid = splits.index("train"), splits.index("valid")
    file, line = columns["_source_file"], columns["_source_line"].decode().to_numpy(zero_copy_only=False)
    if rule.file is None:
        return np.full(len(line), train, np.int8)
    # Arrow orders texts by their UTF-8 bytes, as Spark does. A sign: before, at, after the file.
    after = pc.greater(file.values, rule.file).to_numpy(zero_copy_only=False).astype(np.int8)
    at = pc.equal(file.values, rule.file).to_numpy(zero_copy_only=False)
    if file.indices is not None:
        after, at = after[file.indices], at[file.indices]
    return np.where((after > 0) | (at & (line >= rule.line)), valid, train).astype(np.int8)


def days(time: pa.Array) -> DayNumbers:
    """Days since 1970 in UTC of a timestamp (in microseconds) or date column; before all days for null. int64 [n]."""
    if (one := _one_day(time)) is not None:
        return np.full(len(time), one, np.int64)
    whole: DayNumbers = pc.fill_null(_numbers(time), np.iinfo(np.int64).min).to_numpy(zero_copy_only=False)
    return whole if pa.types.is_date(time.type) else whole // _DAY_US


def _one_day(time: pa.Array) -> int | None:
    """The day of all values, as most files of a lake by days have it; None: there are several, or nulls."""
    if not len(time) or time.null_count:
        return None
    ends = pc.min_max(_numbers(time)).as_py()
    first, last = (n if pa.types.is_date(time.type) else n // _DAY_US for n in (ends["min"], ends["max"]))
    return first if first == last else None


def _numbers(time: pa.Array) -> pa.Int64Array:
    """Microseconds, or days."""
    return (time.cast(pa.int32()) if pa.types.is_date(time.type) else time).cast(pa.int64())
