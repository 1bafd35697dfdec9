"""Statistics of a piece of the lake: of distinct values and how often they are there, where that is enough.

The same tables as headrace.features.learn.statistics.arrow_partial makes of the rows one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.features.engines.arrow.dictionary import Cells, Index
from headrace.features.functions.arrays import doubles, to_numpy
from headrace.features.learn import exact_sums
from headrace.features.learn.statistics import LABEL, Partial, Rows, Statistic, arrow_partial, assemble, merge, rounded
from headrace.features.types import ValueType

I64 = npt.NDArray[np.int64]
_LAST = np.iinfo(np.int64).max


@dataclass(frozen=True)
class TrainRows:
    """The rows of a piece that statistics are of, and what is known of each row of the piece."""

    #: Which rows; None: all.
    train: npt.NDArray[np.bool_] | None
    #: The label, a value a row.
    label: pa.Array
    identity: I64
    #: Of each row; None: all on one day.
    day: I64 | None

    @property
    def training_identity(self) -> pa.Array:
        """The identity of each row of the piece, null of those that are not of the training range."""
        return pa.array(self.identity, mask=None if self.train is None else ~self.train)

    @property
    def count(self) -> int:
        return len(self.identity) if self.train is None else int(np.count_nonzero(self.train))

    def filter(self, x: pa.Array) -> pa.Array:
        """The values of these rows."""
        return x if self.train is None else x.filter(pa.array(self.train))

    @cached_property
    def rows(self) -> Rows:
        """For statistics that need more than values."""
        pick: npt.NDArray[np.bool_] | slice = slice(None) if self.train is None else self.train
        day = None if self.day is None else self.day[pick]
        return Rows(day, self.filter(self.label), self.identity[pick])

    def weigh(self, index: Index, size: int) -> I64:
        """How many of these rows have each of the values 0..size-1."""
        return np.bincount(index if self.train is None else index[self.train], minlength=size)

    def first_day(self, index: Index, size: int) -> I64:
        """The first day of each value; of one without rows the last day there is. int64 [size]."""
        if self.day is None:
            return np.zeros(size, np.int64)
        day = self.rows.day
        assert day is not None
        if not len(day):
            return np.full(size, _LAST)
        if (day == day[0]).all():
            return np.full(size, day[0])
        mine = index if self.train is None else index[self.train]
        out = np.full(size, _LAST)
        for one in np.unique(day)[::-1]:  # a file has few days
            out[mine[day == one]] = one
        return out


def partial_of(
    statistic: Statistic, cells: Mapping[str, Cells], types: Mapping[str, ValueType], rows: TrainRows
) -> Partial:
    """One statistic of the rows. `cells`: the operator's columns as they arrive, of the whole piece."""
    names = list(dict.fromkeys((*statistic.key, *(n.column for n in statistic.numbers))))
    if (
        len(names) == 1
        and names[0] != LABEL
        and not statistic.folds
        and not (statistic.key and statistic.numbers)
        and cells[names[0]].index is not None
    ):
        return _of_values(statistic, cells[names[0]], rows)
    columns = {n: rows.filter(cells[n].rows()) for n in names if n != LABEL}
    return arrow_partial(statistic, columns, types, rows.rows)


def _of_values(statistic: Statistic, column: Cells, rows: TrainRows) -> Partial:
    assert column.index is not None
    size = len(column.values)
    weights = rows.weigh(column.index, size)
    out: dict[str, pa.Array] = {}
    sums: dict[tuple[str, str], dict[int, I64]] = {}
    if statistic.key:
        if statistic.kind == "number":
            x = exact_sums.usable(to_numpy(doubles(column.values)))
            there = (weights > 0) & ~np.isnan(x)
            out["key"] = pa.array(rounded(x[there], statistic.bits))
        else:
            there = (weights > 0) & column.values.is_valid().to_numpy(zero_copy_only=False)
            out["key"] = column.values.filter(pa.array(there)).cast(pa.string())
        out["rows"] = pa.array(weights[there])
        if statistic.day:
            out["day"] = pa.array(rows.first_day(column.index, size)[there])
        made = assemble(out, sums)
        # Operators before this one, or rounding, may have made values the same.
        same = not (column.distinct and statistic.kind == "text") and len(out["key"].unique()) < len(out["key"])
        return merge([made, made.slice(0, 0)]) if same else made
    n = rows.count
    out["rows"] = pa.array([n], pa.int64())
    if statistic.day:
        first = rows.rows.day
        out["day"] = pa.array([0 if first is None else int(first.min()) if n else _LAST], pa.int64())
    x = exact_sums.usable(to_numpy(doubles(column.values)))
    there = (weights > 0) & ~np.isnan(x)
    x, weights = x[there], weights[there]
    count = int(weights.sum())
    for i, number in enumerate(statistic.numbers):
        out[f"{i}.count"] = pa.array([count], pa.int64())
        if number.ends:
            out[f"{i}.min"] = pa.array([x.min() if count else None], pa.float64())
            out[f"{i}.max"] = pa.array([x.max() if count else None], pa.float64())
        if number.sum or number.squares:
            totals = exact_sums.total(x, exact_sums.places_of(x), number.squares, weights)
            first_sums, squares = ({p: np.array([s]) for p, s in part.items()} for part in totals)
            sums[f"{i}", "sum"] = first_sums
            if number.squares:
                sums[f"{i}", "squares"] = squares
    return assemble(out, sums)
