"""Statistics of parts of the training rows, which merge into the statistics of the whole: all that fits learn.

An operator that learns says what it needs as named `Statistic`s: rows in groups by a key, and of each group the number
of rows and count, sum, sum of squares, least and greatest of some numbers. The statistic of any part of the rows (a
batch, a file, a day) is a `Partial`, an Arrow table, small beside the rows, that can be kept as it is in Arrow IPC or
Parquet:

    statistics = op.statistics(types)                       # {name: Statistic}
    partial = aggregate_batch(statistic, columns, types, rows)  # of a batch: features.arrow.aggregate
    partial = merge(partials)                               # whatever the parts
    learned = op.finish({name: partial, ...}, types)        # states and keyed tables

`merge` is associative and commutative to the bit once `canonical` has put the groups in order: keys are exact, counts
are integers, sums are exact (learn.exact_sums), and least and greatest know no negative zero. Spark makes the
very same tables by plain aggregates (features.spark.aggregate), so both engines learn the same bits. All
operators that learn are mergeable; what the tables cost is the number of groups: 1 for normalize and normalize_minmax;
distinct values for categorify, value_count, join_groupby; values times folds for target_encoding; for fill_median and
quantile_bin distinct numbers of `significant_bits` bits, so at most 2**significant_bits for each doubling of their
range.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.features.functions.arrays import one_chunk
from headrace.features.learn import exact_sums
from headrace.features.learn.exact_sums import F64, I64

if TYPE_CHECKING:
    from pyspark.sql import Column


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
    """A number to measure in each group: always its count, of `usable` numbers in the sense of `exact_sums`."""

    #: A column of the operator, or LABEL.
    column: str
    sum: bool = False
    squares: bool = False
    #: Least and greatest.
    minmax: bool = False


@dataclass(frozen=True)
class Statistic:
    """A statistic to collect of the training rows."""

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
class BatchRows:
    """Columns of a batch's rows that a statistic may need besides the operator's. Each as long as the batch."""

    #: Orders the days on which values were first seen; None: all on one day, 0.
    day: I64 | None = None
    #: Number or boolean.
    label: pa.Array | None = None
    #: xxhash64 of `_source_file` and `_source_line` as Spark's: int64.
    identity: I64 | None = None


def empty(statistic: Statistic) -> Partial:
    """Return the statistic with keys of no rows."""
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
    """Return digits of a sum by place: int64 [groups] each."""
    prefix = f"{number}.{measure}."
    return {
        int(name.removeprefix(prefix)): partial.column(name).to_numpy()
        for name in partial.column_names
        if name.startswith(prefix)
    }


def counts(partial: Partial, column: str = "rows") -> I64:
    """Return a column of integers, int64 [groups]."""
    numbers_of_groups: I64 = partial.column(column).to_numpy()
    return numbers_of_groups


def assemble(columns: Mapping[str, pa.Array], sums: Mapping[tuple[str, str], Mapping[int, I64]]) -> Partial:
    """Return a statistic's table of its columns and of digits by (number, measure) and place."""
    out = dict(columns)
    for (number, measure), digits in sums.items():
        for place, digit in exact_sums.normalized(digits).items():
            out[f"{number}.{measure}.{place}"] = pa.array(digit)
    return pa.table(out)


def merge_all(parts: Iterable[Partials]) -> dict[str, Partial]:
    """Return the statistics of all parts' rows together; the parts' statistics have the same names."""
    by_name: dict[str, list[Partial]] = {}
    for part in parts:
        for name, partial in part.items():
            by_name.setdefault(name, []).append(partial)
    return {name: merge(partials) for name, partials in by_name.items()}


def merge(parts: Sequence[Partial]) -> Partial:
    """Return the statistic of the rows of one or more parts (of one statistic) together; groups in any order."""
    if len(parts) == 1:
        return parts[0]
    names = list(dict.fromkeys(name for part in parts for name in part.column_names))
    rows = [part.num_rows for part in parts]
    keys = [name for name in ("key", "fold") if name in names]
    groups, n, group_keys = groups_of({k: _dictionary(parts, k) for k in keys}, sum(rows))
    out: dict[str, pa.Array] = dict(group_keys)
    sums: dict[tuple[str, str], dict[int, I64]] = {}
    for name in names:
        if name in keys:
            continue
        number, _, rest = name.partition(".")
        measure, _, place = rest.partition(".")
        if measure in ("min", "max"):
            values = pa.concat_arrays([one_chunk(p.column(name)) for p in parts])
            out[name] = _least(values, groups, n, measure == "max")
            continue
        joined = np.concatenate(
            [_numpy(p.column(name)) if name in p.column_names else np.zeros(p.num_rows, np.int64) for p in parts]
        )
        if name == "day":
            out[name] = pa.array(extreme(joined, groups, n, np.minimum, np.iinfo(np.int64).max))
            continue
        added = np.zeros(n, np.int64)
        np.add.at(added, groups, joined)
        if place:
            sums.setdefault((number, measure), {})[int(place)] = added
        else:
            out[name] = pa.array(added)
    return assemble(out, sums)


def canonical(partial: Partial) -> Partial:
    """Return the same groups in order of key and fold, the same columns in order: equal statistics are equal tables."""
    partial = partial.select(sorted(partial.column_names)).combine_chunks()
    keys = [(name, "ascending") for name in ("key", "fold") if name in partial.column_names]
    return partial.sort_by(keys).combine_chunks() if keys else partial


def groups_of(keys: Mapping[str, pa.Array], n: int) -> tuple[npt.NDArray[np.intp], int, dict[str, pa.Array]]:
    """Return each row's group 0..size-1, the size, and the groups' keys, texts for `key` unless it is numbers."""
    if not keys:
        return np.zeros(n, np.intp), 1, {}
    groups, possible = np.zeros(n, np.intp), 1
    dictionaries: dict[str, pa.Array] = {}
    for name, key in keys.items():
        # Integers are grouped as integers, and each distinct one is spelled once.
        encoded = _encoded(key)
        dictionaries[name] = encoded.dictionary
        size = len(encoded.dictionary)
        groups, possible = groups * size + encoded.indices.to_numpy(zero_copy_only=False), possible * size
    out: dict[str, pa.Array] = {}
    if len(keys) > 1:
        if possible <= 8 * n:  # a counter for each is cheaper than a sort
            used_groups = np.flatnonzero(np.bincount(groups, minlength=possible))
            number = np.zeros(possible, np.intp)
            number[used_groups] = np.arange(len(used_groups))
            groups = number[groups]
        else:
            used_groups, groups = np.unique(groups, return_inverse=True)
        size = len(used_groups)
        for name, dictionary in reversed(dictionaries.items()):
            out[name] = dictionary.take(pa.array(used_groups % len(dictionary)))
            used_groups = used_groups // len(dictionary)
    else:
        out = dict(dictionaries)
    if "key" in out and not pa.types.is_floating(out["key"].type):
        out["key"] = out["key"].cast(pa.string())
    return groups, size, out


def _encoded(key: pa.Array) -> pa.DictionaryArray:
    if pa.types.is_dictionary(key.type):
        return key
    if pa.types.is_boolean(key.type):  # Arrow's encoder spells no booleans
        key = key.cast(pa.string())
    return key.dictionary_encode()


def _dictionary(parts: Sequence[Partial], name: str) -> pa.DictionaryArray:
    """Return a column of all parts. Not of one array: Arrow has 2 GiB of texts there, and most are in several parts."""
    chunks = [chunk for part in parts for chunk in part.column(name).chunks]
    return pa.chunked_array(chunks, parts[0].schema.field(name).type).dictionary_encode().combine_chunks()


def _numpy(column: pa.ChunkedArray) -> Any:
    return column.to_numpy()


def extreme(x: Any, groups: npt.NDArray[np.intp], n: int, ufunc: Any, start: float) -> Any:
    """Return `ufunc` (minimum or maximum) over each of n groups; `start` of one without rows. [rows] -> [n]."""
    out = np.full(n, start, x.dtype)
    ufunc.at(out, groups, x)
    return out


def _least(values: pa.Array, groups: npt.NDArray[np.intp], n: int, greatest: bool) -> pa.Array:
    """Return the least or greatest of each group; null of none."""
    is_present = values.is_valid().to_numpy(zero_copy_only=False)
    x = values.drop_null().to_numpy(zero_copy_only=False)
    start = -np.inf if greatest else np.inf
    out = extreme(x, groups[is_present], n, np.maximum if greatest else np.minimum, start)
    # Only finite numbers are in statistics.
    return pa.array(out, mask=np.isinf(out))


def folds_of(identity: npt.NDArray[np.int64], folds: int) -> npt.NDArray[np.int32]:
    """Return the fold of each row, 0 to folds - 1. int64 [n] -> int32 [n]."""
    return ((identity >> 20) % folds).astype(np.int32)


def spark_fold(identity: Column, folds: int) -> Column:
    """Return the same as an int column, of the hash of a row's identity as bigint."""
    from pyspark.sql import functions as F

    return F.pmod(F.shiftright(identity, 20), F.lit(folds).cast("bigint")).cast("int")


def cumulated(partial: Partial) -> tuple[F64, I64]:
    """Return (values, how many are not above each) of a statistic by numbers.

    float64 [groups], int64 [groups], ascending.
    """
    values = partial.column("key").to_numpy()
    order = np.argsort(values)
    return values[order], np.cumsum(counts(partial)[order])


def median(values: F64, upto: I64) -> float:
    """Return the middle value, or the mean of the two in the middle. `values` is not empty."""
    n = int(upto[-1])
    low, high = np.searchsorted(upto, [(n + 1) // 2, n // 2 + 1])
    return float(values[low] / 2 + values[high] / 2)


def quantile_edges(values: F64, upto: I64, bins: int) -> list[float]:
    """Return distinct values v_1 < v_2 < ...: for each i in 1..bins-1 the least that i/bins of the values do not
    exceed.
    """
    if not len(values):
        return []
    n = int(upto[-1])
    ranks = [-(-i * n // bins) for i in range(1, bins)]
    distinct = np.unique(values[np.searchsorted(upto, ranks)])
    return [float(v) for v in distinct]
