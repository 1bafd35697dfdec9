"""Confidence intervals by the Poisson bootstrap over users (Hanley and MacGibbon, 2006; Chamandy et al., 2012).

A replicate counts each user so often as a Poisson variable of mean 1 says, all rows of a user alike, since they are
not independent of each other. The variable is a function of seed, replicate and user: every rank draws the same
for a user of whom it has some rows, and tells nobody.
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

    `confidence`: the share of the replicates that an interval holds.
    """

    replicates: int = 0
    seed: int = 0
    confidence: float = 0.95

    def counts(self, users: I64, replicate: int) -> I64:
        """Return the weight of each user in a replicate (from 1); replicate 0 is the rows as they are. int64 [n]."""
        if replicate == 0:
            return np.ones(len(users), np.int64)
        # Hashed twice: of ids in a row, and of replicates in a row, no pattern stays.
        hashed = mix(mix(users, self.seed).view(np.int64), replicate)
        uniform = (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53
        counts: I64 = np.searchsorted(_CUMULATIVE, uniform, side="right").astype(np.int64)
        return counts

    def all_counts(self, users: I64) -> Iterator[I64]:
        """Yield `counts` of the rows as they are, then of each replicate."""
        return (self.counts(users, replicate) for replicate in range(1 + self.replicates))

    def interval(self, values: F64) -> tuple[float, float] | None:
        """Return the middle `confidence` of the replicates' values, by percentiles.

        Args:
            values: float64 [1 + replicates], the first of the rows as they are; NaN where there is none.

        Returns:
            None without replicates, or where less than half of them have a value.
        """
        known = values[1:][~np.isnan(values[1:])]
        if not len(known) or 2 * len(known) < self.replicates:
            return None
        tail = (1 - self.confidence) / 2
        low, high = np.quantile(known, [tail, 1 - tail])
        return float(low), float(high)


NO_REPLICATES = Bootstrap()


#: Smaller numbers are taken for 0.
_SMALLEST = 2.0**-100
#: Columns of so many rows are in memory at once, where there are no more cells.
ROWS_AT_ONCE = 1 << 20
#: Of some rows the columns of whole and of real numbers, by name: int64 [m] and float64 [m] each.
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
    """Add up columns of the rows of all ranks by cell. Collective.

    Real numbers are added as whole numbers (headrace.features.learn.exact_sums) and rounded once, at the end.

    Args:
        cells: how many there are.
        cell: of each row, in [0, cells); int64 [n].
        users: whom a replicate counts the row with; None only without replicates. int64 [n].
        columns: gives the columns of some rows, asked for more than once. A rank's sums of whole numbers are below
            2^53; real numbers are finite and at most 2^100, what is below 2^-100 is taken for 0.
        bootstrap: the replicates.

    Returns:
        By column: float64 [1 + replicates, cells], the first of the rows as they are.
    """
    if users is None:
        distinct, of_row = np.zeros(1, np.int64), cell
        pair_cell, pair_user = np.arange(cells), np.zeros(cells, np.int64)
    else:
        # Rows of one user in one cell count alike in every replicate: they are added up beforehand.
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
        users: whom a replicate counts a row with, int64 [n]; None only without replicates.
        slices: for each dimension the position of the row's value, -1 where it is none; int64 [n].
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


#: By split and metric, the value in each replicate, None where it is undefined.
Replicates = Mapping[str, Mapping[str, Sequence[float | None]]]


@dataclass(frozen=True)
class Difference:
    """Difference of a metric from the other model's.

    low, high: the middle `confidence` of the replicates' differences. p: two-sided, of the hypothesis that there is no
    difference: twice the share of the replicates whose difference is not on the side of most, the rows themselves
    counted as one (so it is at least 2 / (replicates + 1)), at most 1.
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
        value: of the rows as they are.
        reference: the other model's.
        my_replicates: in each replicate.
        other_replicates: the other model's, of the same draws.
        confidence: the share of the replicates' differences that the interval holds.

    Returns:
        None where a value is undefined, or in more than half of the replicates.

    Raises:
        ValueError: other numbers of replicates: these were not drawn together.
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
    """Keep the replicates of a run's splits; nothing where there are none."""
    if any(replicates.values()):
        file.put_text(json.dumps(replicates))


def read_replicates(file: Location) -> Replicates | None:
    """Return the replicates that `write_replicates` has written, or None."""
    try:
        replicates: Replicates = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return replicates
