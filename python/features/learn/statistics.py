"""What fits learn, as statistics of parts that merge into the statistics of the whole.

An operator that learns says what it needs as named `Statistic`s: rows in groups by a key, and of each group the number
of rows and count, sum, sum of squares, least and greatest of some numbers. The statistic of any part of the rows (a
batch, a file, a day) is a `Partial`, an Arrow table, small beside the rows, that can be kept as it is in Arrow IPC or
Parquet:

    statistics = op.statistics(types)                       # {name: Statistic}
    partial = aggregate_batch(statistic, columns, types, rows)  # of a batch: engines.arrow.aggregate
    partial = merge(partials)                               # whatever the parts: learn.merge
    learned = op.finish({name: partial, ...}, types)        # states and keyed tables

`merge` is associative and commutative to the bit once `canonical` has put the groups in order: keys are exact, counts
are integers, sums are exact (learn.exact_sums), and least and greatest know no negative zero. Spark makes the
very same tables by plain aggregates (engines.spark.aggregate), so both engines learn the same bits. All
operators that learn are mergeable; what the tables cost is the number of groups: 1 for normalize and normalize_minmax;
distinct values for categorify, value_count, join_groupby; values times folds for target_encoding; for fill_median and
quantile_bin distinct numbers of `significant_bits` bits, so at most 2**significant_bits for each doubling of their
range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import pyarrow as pa

from headrace.features.learn import exact_sums
from headrace.features.learn.exact_sums import I64

#: A statistic of some rows: a row a group. Columns: key (string or double), fold (int32), rows (int64), day (int64, the
#: first), and for number i `i.count` (int64), `i.min`, `i.max` (double; null where the count is 0), `i.sum.P` and
#: `i.squares.P` (int64: the digit at place P, see headrace.features.learn.exact_sums; a place that is missing is 0).
Partial: TypeAlias = pa.Table
Partials: TypeAlias = Mapping[str, Partial]

#: Stands for the workflow's label among a statistic's columns.
LABEL = "\0label"
#: A hidden column of rows to be transformed: xxhash64 of `_source_file` and `_source_line` of rows of the training
#: range, null of others. Where it is missing no row is of the training range, as in scoring and serving.
IDENTITY = "__identity"


@dataclass(frozen=True)
class Number:
    """What to know of a number in each group: always how many there are, `usable` in the sense of `exact`."""

    #: A column of the operator, or LABEL.
    column: str
    sum: bool = False
    squares: bool = False
    #: Least and greatest.
    minmax: bool = False


@dataclass(frozen=True)
class Statistic:
    """What to collect of the training rows."""

    #: Columns whose values make the key; rows (or elements of the one list) with a null there are left out. None: all
    #: rows are one group.
    key: tuple[str, ...] = ()
    #: text: the values as texts, several made one by functions.keys. number: the one column as a usable double.
    kind: Literal["text", "number"] = "text"
    #: number: rounded to this many significant bits.
    bits: int = 53
    #: Groups are also by the row's fold of so many, see `folds_of`; 0: no folds.
    folds: int = 0
    #: The first day is requested.
    day: bool = False
    numbers: tuple[Number, ...] = ()


@dataclass(frozen=True)
class Rows:
    """What a statistic may need of a batch's rows besides the operator's columns. Each as long as the batch."""

    #: Orders the days on which values were first seen; None: all on one day, 0.
    day: I64 | None = None
    #: Number or boolean.
    label: pa.Array | None = None
    #: xxhash64 of `_source_file` and `_source_line` as Spark's: int64.
    identity: I64 | None = None


def empty(statistic: Statistic) -> Partial:
    """The statistic with keys of no rows."""
    columns = {"key": pa.float64() if statistic.kind == "number" else pa.string()}
    if statistic.folds:
        columns["fold"] = pa.int32()
    columns["rows"] = pa.int64()
    if statistic.day:
        columns["day"] = pa.int64()
    for i, number in enumerate(statistic.numbers):
        columns[f"{i}.count"] = pa.int64()
        if number.minmax:
            columns |= {f"{i}.min": pa.float64(), f"{i}.max": pa.float64()}
    return pa.schema(list(columns.items())).empty_table()


def numbers(partial: Partial, number: int, measure: Literal["sum", "squares"]) -> dict[int, I64]:
    """Digits of a sum by place: int64 [groups] each."""
    prefix = f"{number}.{measure}."
    return {
        int(name.removeprefix(prefix)): partial.column(name).to_numpy()
        for name in partial.column_names
        if name.startswith(prefix)
    }


def counts(partial: Partial, column: str = "rows") -> I64:
    """A column of integers, int64 [groups]."""
    found: I64 = partial.column(column).to_numpy()
    return found


def assemble(columns: Mapping[str, pa.Array], sums: Mapping[tuple[str, str], Mapping[int, I64]]) -> Partial:
    """A statistic's table of its columns and of digits by (number, measure) and place."""
    out = dict(columns)
    for (number, measure), digits in sums.items():
        for place, digit in exact_sums.carried(digits).items():
            out[f"{number}.{measure}.{place}"] = pa.array(digit)
    return pa.table(out)
