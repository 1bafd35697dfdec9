"""Confidence intervals by the Poisson bootstrap over users (Hanley and MacGibbon, 2006; Chamandy et al., 2012).

A replicate weights each user by a Poisson variable of mean 1. All rows of a user have the same weight, since they are
not independent of each other. The variable is a function of seed, replicate and user, so all ranks draw the same number
for a user without communication.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.embeddings.kernels.id_map import mix
from headrace.features.learn import exact_sums
from headrace.storage import Location
from headrace.train.evaluation.ranks import F64, I64, OVERALL, Dimension, Ranks

#: P(at most k) of a Poisson variable of mean 1; the last one is 1 as a double.
_CUMULATIVE = np.cumsum([math.exp(-1) / math.factorial(k) for k in range(20)])


@dataclass(frozen=True)
class Bootstrap:
    """Number of replicates and their seed; without replicates there are no intervals.

    `confidence`: share of the replicates within an interval.
    """

    replicates: int = 0
    seed: int = 0
    confidence: float = 0.95

    def counts(self, users: I64, replicate: int) -> I64:
        """Return the weight of each user in a replicate (from 1), int64 [n]; replicate 0 has the weights 1."""
        if replicate == 0:
            return np.ones(len(users), np.int64)
        # Hash twice, so that consecutive ids and consecutive replicates leave no pattern.
        hashed = mix(mix(users, self.seed).view(np.int64), replicate)
        uniform = (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53
        counts: I64 = np.searchsorted(_CUMULATIVE, uniform, side="right").astype(np.int64)
        return counts

    def all_counts(self, users: I64) -> Iterator[I64]:
        """Yield `counts` of replicate 0, then of each other replicate."""
        return (self.counts(users, replicate) for replicate in range(1 + self.replicates))

    def interval(self, values: F64) -> tuple[float, float] | None:
        """Return the middle `confidence` of the replicates' values, by percentiles.

        Args:
            values: float64 [1 + replicates], the first of the unweighted rows; NaN where undefined.

        Returns:
            (low, high); None without replicates, or if less than half of them have a value.
        """
        known = values[1:][~np.isnan(values[1:])]
        if not len(known) or 2 * len(known) < self.replicates:
            return None
        tail = (1 - self.confidence) / 2
        low, high = np.quantile(known, [tail, 1 - tail])
        return float(low), float(high)


NO_REPLICATES = Bootstrap()


#: Smaller numbers count as 0.
_SMALLEST = 2.0**-100
#: Number of rows whose columns are in memory at once, unless there are more cells.
ROWS_AT_ONCE = 1 << 20
#: Function that returns columns of some rows, by name: integers int64 [m] and real numbers float64 [m].
Columns = Callable[[slice], tuple[Mapping[str, I64], Mapping[str, F64]]]


def sum_by_cell(
    ranks: Ranks,
    cells: int,
    cell: I64,
    users: I64 | None,
    integers: Mapping[str, I64],
    reals: Mapping[str, F64],
    bootstrap: Bootstrap,
) -> dict[str, F64]:
    """Return `sum_columns` of the given columns, int64 [n] and float64 [n] each. Collective."""

    def columns_of(rows: slice) -> tuple[dict[str, I64], dict[str, F64]]:
        return {name: x[rows] for name, x in integers.items()}, {name: x[rows] for name, x in reals.items()}

    return sum_columns(ranks, cells, cell, users, columns_of, bootstrap)


def sum_columns(
    ranks: Ranks, cells: int, cell: I64, users: I64 | None, columns: Columns, bootstrap: Bootstrap
) -> dict[str, F64]:
    """Sum columns of the rows of all ranks by cell. Collective.

    Real numbers are summed exactly (headrace.features.learn.exact_sums) and rounded once, at the end.

    Args:
        cells: number of cells.
        cell: cell of each row, in [0, cells); int64 [n].
        users: user of each row, whose weight a replicate uses, int64 [n]; None only without replicates.
        columns: returns the columns of some rows, and is called several times. A rank's sums of integers must be below
            2^53. Real numbers must be finite and at most 2^100; those below 2^-100 count as 0.
        bootstrap: the replicates.

    Returns:
        by column: float64 [1 + replicates, cells]; index 0 has the sums of the unweighted rows.
    """
    if users is None:
        distinct, of_row = np.zeros(1, np.int64), cell
        pair_cell, pair_user = np.arange(cells), np.zeros(cells, np.int64)
    else:
        # Rows of one user in one cell have the same weight in every replicate: sum them first.
        distinct, index = np.unique(users, return_inverse=True)
        pair, of_row = np.unique(cell * max(len(distinct), 1) + index, return_inverse=True)
        pair_cell, pair_user = pair // max(len(distinct), 1), pair % max(len(distinct), 1)
    pairs = len(pair_cell)
    step = max(ROWS_AT_ONCE, pairs)
    parts = [slice(start, start + step) for start in range(0, max(len(cell), 1), step)]
    if len(parts) == 1:
        columns = _once(columns(parts[0]))
    names, table = _added_up(ranks, parts, of_row, pairs, columns)
    starts = np.flatnonzero(np.diff(pair_cell, prepend=-1))
    totals = np.zeros((1 + bootstrap.replicates, len(table), cells), np.int64)
    if pairs:
        for replicate, counts in enumerate(bootstrap.all_counts(distinct)):
            totals[replicate][:, pair_cell[starts]] = np.add.reduceat(table * counts[pair_user], starts, axis=1)
    totals = ranks.add_up(totals)
    sums: dict[str, F64] = {}
    for name in dict.fromkeys(name for name, _ in names):
        digits = {place: totals[:, i].reshape(-1) for i, (n, place) in enumerate(names) if n == name}
        sums[name] = exact_sums.floats(digits, (1 + bootstrap.replicates) * cells).reshape(-1, cells)
    return sums


def sums_by_slice(
    ranks: Ranks,
    columns: Mapping[str, F64],
    users: I64 | None,
    slices: Sequence[I64],
    dimensions: Sequence[Dimension],
    bootstrap: Bootstrap,
) -> Iterator[dict[str, F64]]:
    """Return the sums of columns, and `rows`, over all rows, then by the slices of each dimension. Collective.

    Args:
        columns: float64 [n] each, as `reals` of `sum_by_cell`.
        users: user of each row, int64 [n]; None only without replicates.
        slices: for each dimension, the position of the row's value, -1 without one; int64 [n].
    """
    n = len(next(iter(columns.values())))
    for number, dimension in enumerate((OVERALL, *dimensions)):
        cell = np.zeros(n, np.int64) if number == 0 else slices[number - 1]
        chosen = cell >= 0
        yield sum_by_cell(
            ranks,
            len(dimension.values),
            cell[chosen],
            None if users is None or not bootstrap.replicates else users[chosen],
            {"rows": np.ones(int(chosen.sum()), np.int64)},
            {name: x[chosen] for name, x in columns.items()},
            bootstrap,
        )


def _once(sums: tuple[Mapping[str, I64], Mapping[str, F64]]) -> Columns:
    return lambda _: sums


def _added_up(
    ranks: Ranks, parts: Sequence[slice], of_row: I64, pairs: int, columns: Columns
) -> tuple[list[tuple[str, int]], I64]:
    """Return the sums of each pair by (column, place of its digits; 0 of whole numbers), int64 [columns and places,
    pairs].
    """
    ends: dict[str, list[float]] = {}
    for part in parts:
        for name, x in columns(part)[1].items():
            size = np.abs(x)
            size = size[size >= _SMALLEST]
            least, most = ends.setdefault(name, [np.inf, 0.0])
            if len(size):
                ends[name] = [min(least, float(size.min())), max(most, float(size.max()))]
    places = {name: _places(ranks, *bounds) for name, bounds in ends.items()}
    sums: dict[tuple[str, int], I64] = {}
    for part in parts:
        integers, reals = columns(part)
        for name, values in integers.items():
            counts = np.bincount(of_row[part], weights=values, minlength=pairs).astype(np.int64)
            sums[name, 0] = sums[name, 0] + counts if (name, 0) in sums else counts
        for name, real in reals.items():
            x = np.where(np.abs(real) < _SMALLEST, 0.0, real)
            of_place, _ = exact_sums.grouped(x, of_row[part], pairs, places[name], squares=False)
            for place in places[name]:
                more = of_place[place]
                sums[name, place] = sums[name, place] + more if (name, place) in sums else more
    return list(sums), np.stack(list(sums.values()))


def _places(ranks: Ranks, least: float, most: float) -> range:
    """Return the places of the digits of all ranks' numbers; those of this rank are from `least` to `most`."""
    ranges = ranks.gather(np.array([least, most]).view(np.int64)).view(np.float64)
    return exact_sums.places(float(ranges[:, 0].min()), float(ranges[:, 1].max()))


#: Values of metrics in each replicate, None where undefined, by split and metric.
Replicates = Mapping[str, Mapping[str, Sequence[float | None]]]


@dataclass(frozen=True)
class Difference:
    """Difference of a metric from that of another model.

    Attributes:
        low: lower end of the middle `confidence` of the replicates' differences.
        high: upper end.
        p: two-sided p-value of the hypothesis of no difference: twice the share of replicates whose difference is not
            on the majority's side, at most 1. The unweighted rows count as one replicate, so it is at least
            2 / (replicates + 1).
    """

    value: float
    low: float
    high: float
    p: float


def difference(
    value: float | None,
    reference: float | None,
    my_replicates: Sequence[float | None],
    other_replicates: Sequence[float | None],
    confidence: float,
) -> Difference | None:
    """Return the difference of two models' values of a metric.

    Args:
        value: value of the unweighted rows.
        reference: the same of the other model.
        my_replicates: values in each replicate.
        other_replicates: values of the other model, in the same replicates.
        confidence: share of the replicates' differences within the interval.

    Returns:
        the difference; None if a value is undefined, or undefined in more than half of the replicates.

    Raises:
        ValueError: the numbers of replicates differ, so they were not drawn together.
    """
    if len(my_replicates) != len(other_replicates):
        raise ValueError(f"{len(my_replicates)} replicates and {len(other_replicates)} were not drawn together")
    if value is None or reference is None or not my_replicates:
        return None
    differences = np.array(my_replicates, np.float64) - np.array(other_replicates, np.float64)
    differences = differences[~np.isnan(differences)]
    if 2 * len(differences) < len(my_replicates):
        return None
    tail = (1 - confidence) / 2
    low, high = np.quantile(differences, [tail, 1 - tail]).tolist()
    opposite = min(int((differences <= 0).sum()), int((differences >= 0).sum()))
    return Difference(value - reference, low, high, min(1.0, 2 * (1 + opposite) / (1 + len(differences))))


def write_replicates(file: Location, replicates: Replicates) -> None:
    """Write the replicates of a run's splits; write nothing without replicates."""
    if any(replicates.values()):
        file.put_text(json.dumps(replicates))


def read_replicates(file: Location) -> Replicates | None:
    """Return the replicates that `write_replicates` has written, or None."""
    try:
        replicates: Replicates = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return replicates
