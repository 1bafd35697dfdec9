"""The split as a rule over Arrow columns: the same rows as layout.split's columns give, without Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.features.engines.arrow.dictionary import Cells

#: A row that is in no split.
DROPPED = -1
_DAY_US = 86_400_000_000

Codes = npt.NDArray[np.int8]
Days = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TimeRule:
    """Train from `first`, valid from `valid` to `last`: days since 1970 in UTC of `column`, both ends included."""

    column: str
    first: int
    valid: int
    last: int


@dataclass(frozen=True)
class PositionRule:
    """Valid begins at this line of this file, in order of file and line; None: nowhere."""

    file: str | None
    line: int


@dataclass(frozen=True)
class ColumnRule:
    """The text of `column` names the split."""

    column: str


Rule = TimeRule | PositionRule | ColumnRule


def columns_of(rule: Rule) -> tuple[str, ...]:
    """Columns that the rule looks at, besides the rows' source."""
    return () if isinstance(rule, PositionRule) else (rule.column,)


def split_codes(rule: Rule, splits: Sequence[str], cells: Mapping[str, Cells]) -> Codes:
    """Each row's position in `splits`, DROPPED for none. int8 [rows]."""
    if isinstance(rule, TimeRule):
        day = days(cells[rule.column].rows())
        train, valid = splits.index("train"), splits.index("valid")
        inside = (day >= rule.first) & (day <= rule.last)
        return np.where(inside, np.where(day >= rule.valid, valid, train), DROPPED).astype(np.int8)
    if isinstance(rule, ColumnRule):
        column = cells[rule.column]
        found = pc.index_in(column.values.cast(pa.string()), pa.array(splits, pa.string()))
        codes: Codes = pc.fill_null(found, DROPPED).to_numpy(zero_copy_only=False).astype(np.int8)
        return codes if column.index is None else codes[column.index]
    train, valid = splits.index("train"), splits.index("valid")
    file, line = cells["_source_file"], cells["_source_line"].rows().to_numpy(zero_copy_only=False)
    if rule.file is None:
        return np.full(len(line), train, np.int8)
    # Arrow orders texts by their UTF-8 bytes, as Spark does. A sign: before, at, after the file.
    after = pc.greater(file.values, rule.file).to_numpy(zero_copy_only=False).astype(np.int8)
    at = pc.equal(file.values, rule.file).to_numpy(zero_copy_only=False)
    if file.index is not None:
        after, at = after[file.index], at[file.index]
    return np.where((after > 0) | (at & (line >= rule.line)), valid, train).astype(np.int8)


def day_number(day: str) -> int:
    """Days since 1970 of an ISO date."""
    return (date.fromisoformat(day) - date(1970, 1, 1)).days


def day_name(number: int) -> str:
    """The reverse of `day_number`."""
    return (date(1970, 1, 1) + timedelta(days=number)).isoformat()


def days(time: pa.Array) -> Days:
    """Days since 1970 in UTC of a timestamp (in microseconds) or date column; before all days for null. int64 [n]."""
    is_date = pa.types.is_date(time.type)
    number = (time.cast(pa.int32()) if is_date else time).cast(pa.int64())
    whole: Days = pc.fill_null(number, np.iinfo(np.int64).min).to_numpy(zero_copy_only=False)
    return whole if is_date else whole // _DAY_US
