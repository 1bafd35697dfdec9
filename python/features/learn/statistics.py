"""What fits learn, as statistics of parts that merge into the statistics of the whole.

An operator that learns says what it needs as named `Statistic`s: rows in groups by a key, and of each group the number
of rows and count, sum, sum of squares, least and greatest of some numbers. The statistic of any part of the rows (a
batch, a file, a day) is a `Partial`, an Arrow table, small beside the rows, that can be kept as it is in Arrow IPC or
Parquet:

    statistics = op.statistics(types)                       # {name: Statistic}
    parts = [op.arrow_partial(columns, types, rows) for ...]   # {name: Partial} of a batch, with Arrow
    whole = merge_all(parts)                                # {name: Partial}, whatever the parts
    learned = op.finish(whole, types)                       # states and keyed tables

`merge` is associative and commutative to the bit once `canonical` has put the groups in order: keys are exact, counts
are integers, sums are exact (learn.exact_sums), and least and greatest know no negative zero. Spark makes the
very same tables by plain aggregates (engines.spark.aggregate), so both engines learn the same bits. All
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
import pyarrow.compute as pc

from headrace.features.functions.arrays import doubles, to_numpy
from headrace.features.functions.keys import joint_key
from headrace.features.learn import exact_sums
from headrace.features.learn.exact_sums import F64, I64
from headrace.features.types import ValueType

if TYPE_CHECKING:
    pass

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
    ends: bool = False


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
    #: The first day is asked for.
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


def merge_all(parts: Iterable[Partials]) -> dict[str, Partial]:
    """The statistics of all parts' rows together; the parts' statistics have the same names."""
    by_name: dict[str, list[Partial]] = {}
    for part in parts:
        for name, partial in part.items():
            by_name.setdefault(name, []).append(partial)
    return {name: merge(partials) for name, partials in by_name.items()}


def merge(parts: Sequence[Partial]) -> Partial:
    """The statistic of the rows of one or more parts (of one statistic) together; groups in any order."""
    if len(parts) == 1:
        return parts[0]
    names = list(dict.fromkeys(name for part in parts for name in part.column_names))
    rows = [part.num_rows for part in parts]
    keys = [name for name in ("key", "fold") if name in names]
    groups, n, kept = _groups({k: _column(parts, k) for k in keys}, sum(rows))
    out: dict[str, pa.Array] = dict(kept)
    sums: dict[tuple[str, str], dict[int, I64]] = {}
    for name in names:
        if name in keys:
            continue
        number, _, rest = name.partition(".")
        measure, _, place = rest.partition(".")
        if measure in ("min", "max"):
            values = pa.concat_arrays([_chunk(p.column(name)) for p in parts])
            out[name] = _least(values, groups, n, measure == "max")
            continue
        whole = np.concatenate(
            [_numpy(p.column(name)) if name in p.column_names else np.zeros(p.num_rows, np.int64) for p in parts]
        )
        if name == "day":
            out[name] = pa.array(_extreme(whole, groups, n, np.minimum, np.iinfo(np.int64).max))
            continue
        added = np.zeros(n, np.int64)
        np.add.at(added, groups, whole)
        if place:
            sums.setdefault((number, measure), {})[int(place)] = added
        else:
            out[name] = pa.array(added)
    return assemble(out, sums)


def canonical(partial: Partial) -> Partial:
    """The same groups in order of key and fold, the same columns in order: equal statistics are equal tables."""
    partial = partial.select(sorted(partial.column_names)).combine_chunks()
    keys = [(name, "ascending") for name in ("key", "fold") if name in partial.column_names]
    return partial.sort_by(keys).combine_chunks() if keys else partial


def arrow_partial(
    statistic: Statistic, columns: Mapping[str, pa.Array], types: Mapping[str, ValueType], rows: Rows
) -> Partial:
    """One statistic of a batch.

    Args:
        columns: the operator's, NaN being null; a list is the key of a statistic without numbers and folds.
        types: of `columns`.
        rows: what the statistic needs of day, label and identity must be there.
    """
    n = len(rows.label) if rows.label is not None else len(next(iter(columns.values())))
    keys: dict[str, pa.Array] = {}
    taken: npt.NDArray[np.intp] | None = None  # rows of the batch that count, one for each element of a list
    if statistic.key:
        key, taken = _key(statistic, columns, types)
        keys["key"] = key
    if statistic.folds:
        if rows.identity is None:
            raise ValueError("a statistic with folds needs the rows' identity")
        folds = folds_of(rows.identity, statistic.folds)
        keys["fold"] = pa.array(folds if taken is None else folds[taken])
    count = n if taken is None else len(taken)
    groups, size, kept = _groups(keys, count)
    out: dict[str, pa.Array] = dict(kept)
    out["rows"] = pa.array(np.bincount(groups, minlength=size).astype(np.int64))
    if statistic.day:
        day = np.zeros(n, np.int64) if rows.day is None else rows.day.astype(np.int64)
        day = day if taken is None else day[taken]
        out["day"] = pa.array(_extreme(day, groups, size, np.minimum, np.iinfo(np.int64).max))
    sums: dict[tuple[str, str], dict[int, I64]] = {}
    for i, number in enumerate(statistic.numbers):
        source = rows.label if number.column == LABEL else columns[number.column]
        if source is None:
            raise ValueError("a statistic of the label needs the rows' label")
        x = exact_sums.usable(to_numpy(doubles(source)))
        x = x if taken is None else x[taken]
        there = ~np.isnan(x)
        x, g = x[there], groups[there]
        counts = np.bincount(g, minlength=size).astype(np.int64)
        out[f"{i}.count"] = pa.array(counts)
        if number.ends:
            for end, ufunc, start in (("min", np.minimum, np.inf), ("max", np.maximum, -np.inf)):
                out[f"{i}.{end}"] = pa.array(_extreme(x, g, size, ufunc, start), mask=counts == 0)
        if number.sum or number.squares:
            places = exact_sums.places_of(x)
            if size == 1 and not keys:
                first, second = _all(x, places, number.squares)
            else:
                first, second = exact_sums.grouped(x, g, size, places, number.squares)
            sums[f"{i}", "sum"] = first
            if number.squares:
                sums[f"{i}", "squares"] = second
    return assemble(out, sums)


def folds_of(identity: I64, folds: int) -> npt.NDArray[np.int32]:
    """A row's fold of `folds`: from other bits of its identity's hash than those that place it in the dataset."""
    return ((identity >> 20) % folds).astype(np.int32)


def numbers(partial: Partial, number: int, measure: Literal["sum", "squares"]) -> dict[int, I64]:
    """Digits of a sum by place: int64 [groups] each."""
    prefix = f"{number}.{measure}."
    return {
        int(name.removeprefix(prefix)): _numpy(partial.column(name))
        for name in partial.column_names
        if name.startswith(prefix)
    }


def counts(partial: Partial, column: str = "rows") -> I64:
    """A column of integers, int64 [groups]."""
    found: I64 = _numpy(partial.column(column))
    return found


def rounded(x: F64, bits: int) -> F64:
    """To `bits` significant bits (Veltkamp's splitting), to nearest. float64 [n] -> float64 [n]."""
    if bits >= 53:
        return x
    far = x * (2.0 ** (53 - bits) + 1.0)
    return far - (far - x)


def _key(
    statistic: Statistic, columns: Mapping[str, pa.Array], types: Mapping[str, ValueType]
) -> tuple[pa.Array, npt.NDArray[np.intp]]:
    """Keys without nulls, and the row of each."""
    first = columns[statistic.key[0]]
    if statistic.kind == "number":
        x = exact_sums.usable(to_numpy(doubles(first)))
        taken = np.flatnonzero(~np.isnan(x))
        return pa.array(rounded(x[taken], statistic.bits)), taken
    if types[statistic.key[0]].is_list:
        lengths = pc.list_value_length(first).to_numpy(zero_copy_only=False)
        key, row = first.flatten(), np.repeat(np.arange(len(first)), lengths)
    else:
        key, row = joint_key([columns[name] for name in statistic.key]), np.arange(len(first))
    there = key.is_valid().to_numpy(zero_copy_only=False)
    return key.drop_null(), row[there]


def _groups(keys: Mapping[str, pa.Array], n: int) -> tuple[npt.NDArray[np.intp], int, dict[str, pa.Array]]:
    """Each row's group 0..size-1, the size, and the groups' keys, texts for `key` unless it is numbers."""
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
            there = np.flatnonzero(np.bincount(groups, minlength=possible))
            number = np.zeros(possible, np.intp)
            number[there] = np.arange(len(there))
            groups = number[groups]
        else:
            there, groups = np.unique(groups, return_inverse=True)
        size = len(there)
        for name, dictionary in reversed(dictionaries.items()):
            out[name] = dictionary.take(pa.array(there % len(dictionary)))
            there = there // len(dictionary)
    else:
        out = dict(dictionaries)
    if "key" in out and not pa.types.is_floating(out["key"].type):
        out["key"] = out["key"].cast(pa.string())
    return groups, size, out


def _encoded(key: pa.Array) -> pa.DictionaryArray:
    if pa.types.is_boolean(key.type):  # Arrow's encoder spells no booleans
        key = key.cast(pa.string())
    return key.dictionary_encode()


def _column(parts: Sequence[Partial], name: str) -> pa.Array:
    return pa.concat_arrays([_chunk(part.column(name)) for part in parts])


def _chunk(column: pa.ChunkedArray) -> pa.Array:
    return (
        column.chunk(0)
        if column.num_chunks == 1
        else pa.concat_arrays(column.chunks)
        if column.num_chunks
        else (pa.array([], column.type))
    )


def _numpy(column: pa.ChunkedArray) -> Any:
    return column.to_numpy()


def _all(x: F64, places: range, squares: bool) -> tuple[dict[int, I64], dict[int, I64]]:
    """`exact.total` as digits of one group; what repeats is cut into digits once."""
    weights = None
    sample = x[:1024]
    if len(x) > 4 * len(sample) and len(np.unique(sample)) < len(sample) // 2:
        counted = pa.array(x).value_counts()
        x, weights = counted.field(0).to_numpy(), counted.field(1).to_numpy()
    sums = exact_sums.total(x, places, squares, weights)
    first, second = ({place: np.array([s]) for place, s in part.items()} for part in sums)
    return first, second


def _extreme(x: Any, groups: npt.NDArray[np.intp], n: int, ufunc: Any, start: float) -> Any:
    out = np.full(n, start, x.dtype)
    ufunc.at(out, groups, x)
    return out


def _least(values: pa.Array, groups: npt.NDArray[np.intp], n: int, greatest: bool) -> pa.Array:
    """The least or greatest of each group; null of none."""
    there = values.is_valid().to_numpy(zero_copy_only=False)
    x = values.drop_null().to_numpy(zero_copy_only=False)
    start = -np.inf if greatest else np.inf
    out = _extreme(x, groups[there], n, np.maximum if greatest else np.minimum, start)
    # Only finite numbers are in statistics.
    return pa.array(out, mask=np.isinf(out))


def assemble(columns: Mapping[str, pa.Array], sums: Mapping[tuple[str, str], Mapping[int, I64]]) -> Partial:
    """A statistic's table of its columns and of digits by (number, measure) and place."""
    out = dict(columns)
    for (number, measure), digits in sums.items():
        for place, digit in exact_sums.carried(digits).items():
            out[f"{number}.{measure}.{place}"] = pa.array(digit)
    return pa.table(out)
