"""The Arrow engine's statistics: of the rows of a batch, or of a row group's distinct values where that is enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.features.arrow.kernels import DictionaryColumn, Indices, count, text_ranges
from headrace.features.functions.arrays import doubles, to_numpy
from headrace.features.functions.keys import joint_key
from headrace.features.learn import exact_sums
from headrace.features.learn.exact_sums import F64, rounded
from headrace.features.learn.statistics import (
    LABEL,
    BatchRows,
    Partial,
    Statistic,
    assemble,
    extreme,
    folds_of,
    groups_of,
    merge,
)
from headrace.features.types import ValueType

I64 = npt.NDArray[np.int64]
_LAST = np.iinfo(np.int64).max


@dataclass(frozen=True)
class TrainRows:
    """The rows of a row group that statistics are of, and what is known of each row of the row group."""

    #: Mask of the rows to count; None: all.
    train: npt.NDArray[np.bool_] | None
    #: The label of each row.
    label: pa.Array
    identity: I64
    #: Day of each row; None: all on one day.
    day: I64 | None

    @property
    def training_identity(self) -> pa.Array:
        """The identity of each row of the row group, null of those that are not of the training range."""
        return pa.array(self.identity, mask=None if self.train is None else ~self.train)

    @property
    def count(self) -> int:
        return len(self.identity) if self.train is None else int(np.count_nonzero(self.train))

    def part(self, start: int, end: int) -> TrainRows:
        """Return the same of the row group's rows from `start` to `end`."""
        train = None if self.train is None else self.train[start:end]
        day = None if self.day is None else self.day[start:end]
        return TrainRows(train, self.label.slice(start, end - start), self.identity[start:end], day)

    def filter(self, x: pa.Array) -> pa.Array:
        """Return the values of these rows."""
        return x if self.train is None else x.filter(pa.array(self.train))

    @cached_property
    def rows(self) -> BatchRows:
        """The rows for statistics that need more than values."""
        pick: npt.NDArray[np.bool_] | slice = slice(None) if self.train is None else self.train
        day = None if self.day is None else self.day[pick]
        return BatchRows(day, self.filter(self.label), self.identity[pick])

    def weigh(self, index: Indices, size: int) -> I64:
        """Return how many of these rows have each of the values 0..size-1. int64 [size]."""
        return count(index, self.train, size)

    def first_day(self, index: Indices, size: int) -> I64:
        """Return the first day of each value; of one without rows the last day there is. int64 [size]."""
        if self.day is None:
            return np.zeros(size, np.int64)
        day = self.rows.day
        assert day is not None
        if len(self._days) < 2:
            return np.full(size, self._days[0] if len(self._days) else _LAST)
        row_index = index if self.train is None else index[self.train]
        out = np.full(size, _LAST)
        for day_number in self._days[::-1]:  # a file has few days
            out[row_index[day == day_number]] = day_number
        return out

    @cached_property
    def _days(self) -> I64:
        """Days of the rows, each once, oldest first."""
        day = self.rows.day
        assert day is not None
        # Most often all days are equal: then nothing need be sorted.
        return day[:1] if len(day) and (day == day[0]).all() else np.unique(day)


def aggregate(
    statistic: Statistic, columns: Mapping[str, DictionaryColumn], types: Mapping[str, ValueType], rows: TrainRows
) -> Partial:
    """Return one statistic of the rows. `columns`: the operator's columns as they arrive, of the whole row group."""
    names = list(dict.fromkeys((*statistic.key, *(n.column for n in statistic.numbers))))
    if (
        len(names) == 1
        and names[0] != LABEL
        and not statistic.folds
        and not (statistic.key and statistic.numbers)
        and columns[names[0]].indices is not None
    ):
        return _of_values(statistic, columns[names[0]], rows)
    parts = []
    ranges = text_ranges((columns[n] for n in names if n != LABEL), len(rows.identity))
    for start, end in ranges:
        range_rows = rows.part(start, end) if len(ranges) > 1 else rows
        decoded = {n: range_rows.filter(columns[n].part(start, end).decode()) for n in names if n != LABEL}
        parts.append(aggregate_batch(statistic, decoded, types, range_rows.rows))
    return merge(parts)


def _of_values(statistic: Statistic, column: DictionaryColumn, rows: TrainRows) -> Partial:
    assert column.indices is not None
    size = len(column.values)
    weights = rows.weigh(column.indices, size)
    out: dict[str, pa.Array] = {}
    sums: dict[tuple[str, str], dict[int, I64]] = {}
    if statistic.key:
        if statistic.kind == "number":
            x = exact_sums.usable(to_numpy(doubles(column.values)))
            is_present = (weights > 0) & ~np.isnan(x)
            out["key"] = pa.array(rounded(x[is_present], statistic.bits))
        else:
            is_present = (weights > 0) & column.values.is_valid().to_numpy(zero_copy_only=False)
            # Most often all values occur, the last of them null.
            is_prefix = is_present.all() or is_present[:-1].all()
            chosen = (
                column.values.slice(0, np.count_nonzero(is_present))
                if is_prefix
                else column.values.filter(pa.array(is_present))
            )
            out["key"] = chosen.cast(pa.string())
        out["rows"] = pa.array(weights[is_present])
        if statistic.day:
            out["day"] = pa.array(rows.first_day(column.indices, size)[is_present])
        statistic_table = assemble(out, sums)
        # Earlier operators, or rounding, may have made values equal.
        same = not (column.distinct and statistic.kind == "text") and len(out["key"].unique()) < len(out["key"])
        return merge([statistic_table, statistic_table.slice(0, 0)]) if same else statistic_table
    n = rows.count
    out["rows"] = pa.array([n], pa.int64())
    if statistic.day:
        first = rows.rows.day
        out["day"] = pa.array([0 if first is None else int(first.min()) if n else _LAST], pa.int64())
    x = exact_sums.usable(to_numpy(doubles(column.values)))
    is_present = (weights > 0) & ~np.isnan(x)
    x, weights = x[is_present], weights[is_present]
    count = int(weights.sum())
    for i, number in enumerate(statistic.numbers):
        out[f"{i}.count"] = pa.array([count], pa.int64())
        if number.minmax:
            out[f"{i}.min"] = pa.array([x.min() if count else None], pa.float64())
            out[f"{i}.max"] = pa.array([x.max() if count else None], pa.float64())
        if number.sum or number.squares:
            totals = exact_sums.total(x, exact_sums.places_of(x), number.squares, weights)
            first_sums, squares = ({p: np.array([s]) for p, s in part.items()} for part in totals)
            sums[f"{i}", "sum"] = first_sums
            if number.squares:
                sums[f"{i}", "squares"] = squares
    return assemble(out, sums)


def aggregate_batch(
    statistic: Statistic, columns: Mapping[str, pa.Array], types: Mapping[str, ValueType], rows: BatchRows
) -> Partial:
    """Return one statistic of a batch.

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
    groups, size, group_keys = groups_of(keys, count)
    out: dict[str, pa.Array] = dict(group_keys)
    out["rows"] = pa.array(np.bincount(groups, minlength=size).astype(np.int64))
    if statistic.day:
        day = np.zeros(n, np.int64) if rows.day is None else rows.day.astype(np.int64)
        day = day if taken is None else day[taken]
        out["day"] = pa.array(extreme(day, groups, size, np.minimum, np.iinfo(np.int64).max))
    sums: dict[tuple[str, str], dict[int, I64]] = {}
    for i, number in enumerate(statistic.numbers):
        source = rows.label if number.column == LABEL else columns[number.column]
        if source is None:
            raise ValueError("a statistic of the label needs the rows' label")
        x = exact_sums.usable(to_numpy(doubles(source)))
        x = x if taken is None else x[taken]
        is_present = ~np.isnan(x)
        x, g = x[is_present], groups[is_present]
        counts = np.bincount(g, minlength=size).astype(np.int64)
        out[f"{i}.count"] = pa.array(counts)
        if number.minmax:
            for end, ufunc, start in (("min", np.minimum, np.inf), ("max", np.maximum, -np.inf)):
                out[f"{i}.{end}"] = pa.array(extreme(x, g, size, ufunc, start), mask=counts == 0)
        if number.sum or number.squares:
            places = exact_sums.places_of(x)
            if size == 1 and not keys:
                first, second = _totals(x, places, number.squares)
            else:
                first, second = exact_sums.grouped(x, g, size, places, number.squares)
            sums[f"{i}", "sum"] = first
            if number.squares:
                sums[f"{i}", "squares"] = second
    return assemble(out, sums)


def _key(
    statistic: Statistic, columns: Mapping[str, pa.Array], types: Mapping[str, ValueType]
) -> tuple[pa.Array, npt.NDArray[np.intp]]:
    """Return keys without nulls, and the row of each."""
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
    is_present = key.is_valid().to_numpy(zero_copy_only=False)
    return key.drop_null(), row[is_present]


def _totals(x: F64, places: range, squares: bool) -> tuple[dict[int, I64], dict[int, I64]]:
    """Return `exact.total` as digits of one group; what repeats is cut into digits once."""
    weights = None
    sample = x[:1024]
    if len(x) > 4 * len(sample) and len(np.unique(sample)) < len(sample) // 2:
        counted = pa.array(x).value_counts()
        x, weights = counted.field(0).to_numpy(), counted.field(1).to_numpy()
    sums = exact_sums.total(x, places, squares, weights)
    first, second = ({place: np.array([s]) for place, s in part.items()} for part in sums)
    return first, second
